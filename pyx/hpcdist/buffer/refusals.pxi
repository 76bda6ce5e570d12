# Why a tensor cannot be used: the errors of fill().


cdef object gaps(str role, object obj):
    shape = tuple(obj.shape)
    strides = obj.stride() if callable(getattr(obj, "stride", None)) else getattr(obj, "strides", "?")
    return ValueError(
        f"{role} of shape {shape} and strides {tuple(strides)} is not dense (it has gaps or overlaps): nothing is "
        f"copied silently, so pass {role}.contiguous() (NumPy: numpy.ascontiguousarray) and copy the result back"
    )


cdef int refuse_masked(object obj, str role) except -1:
    """NumPy's masked arrays: their memory contains the elements that the mask takes out."""
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(obj, masked.MaskedArray):
        raise TypeError(
            f"{role} is a NumPy masked array, whose mask no operation moves or respects; pass {role}.filled(...), or "
            f"{role}.data and the mask one by one"
        )
    return 0


cdef bint nowhere(object obj, hd_buf* b) except -1:
    """Whether a tensor at a low address has no memory: then the address is its offset."""
    return <uintptr_t> b.ptr == <uintptr_t> obj.storage_offset() * hd_itemsize(b.dtype)


cdef str without_memory(object torch, object obj):
    """What kind of torch tensor this is, if it has no memory of its own that could be sent; None if it has."""
    wrapped = torch._C._functorch
    if wrapped.is_batchedtensor(obj):
        return "is inside torch.vmap, which no operation between processes can be part of: make the call outside of it"
    if wrapped.is_gradtrackingtensor(obj):
        return "is inside a transform of torch.func: make the call outside of it"
    if torch._is_functional_tensor(obj):
        return "is a functionalized tensor, as in tracing: it has no memory of its own"
    if obj.is_nested:
        return "is a nested tensor: its parts have shapes of their own; pass one dense tensor, e.g. its values()"
    if interprets(torch, type(obj)):
        return (f"is a {type(obj).__name__}, a class that carries out operations itself (__torch_dispatch__), so its "
                "memory is not known; pass the tensor that it stands for (of a DTensor: "
                "to_local(); of an AsyncCollectiveTensor: wait())")
    if obj.layout != torch.strided or obj.device.type == "meta":
        return None
    if obj._is_zerotensor():
        return "is a tensor of zeros without memory (torch._efficientzerotensor): pass its clone()"
    if obj.numel() and not obj.untyped_storage().nbytes():
        return "has no memory: its storage was freed (resized to 0)"
    return None


cdef bint interprets(object torch, object tp) except -1:
    return tp.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


cdef object refuse(object obj, str role, str device="cpu"):
    """Says why a tensor cannot be used by a group that moves tensors on `device`."""
    name = role.rpartition(": ")[2]  # without the operation's
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        why = without_memory(torch, obj)
        if why is not None:
            raise TypeError(f"{role} {why}")
        if obj.layout != torch.strided:
            raise TypeError(f"{role} is a {obj.layout} tensor; pass a dense one, e.g. {name}.to_dense()")
        if obj.device.type == "meta":
            raise TypeError(f"{role} is a meta tensor: it has no data to move")
        if obj.device.type != device:
            moves, how = ("CPU tensors", "cpu()") if device == "cpu" else (f"tensors on {device}", f"to({device!r})")
            raise ValueError(f"{role} is on {obj.device}; this process group moves {moves} only, pass {name}.{how}")
        if obj.is_conj() or obj.is_neg():
            raise ValueError(
                f"{role} is a lazily conjugated or negated view; pass {name}.resolve_conj().resolve_neg()"
            )
        raise TypeError(f"{role} has dtype {obj.dtype}, which hpcdist does not move")
    raise TypeError(
        f"{role} is a {type(obj).__name__}; expected a torch tensor, a NumPy array, or an object with the buffer "
        f"protocol or DLPack on the host"
    )
