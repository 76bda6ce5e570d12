"""The collectives and point-to-point operations of a group, one file per kind.

Each public function has the signature of torch's, looks up the group's communicator and calls it.
Nothing is checked twice: the native call checks tensors, dtypes, sizes and reduce-ops.
"""
