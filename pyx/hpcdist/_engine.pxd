"""The engine's C interface as Cython sees it; see the header of each block, in engine/, for what each
function does."""

from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t

from hpcdist._buffer cimport hd_buf
from hpcdist.libmpi cimport MPI_Comm

cdef extern from "hd_base.h" nogil:
    enum:
        HD_OK, HD_ERR_BACKEND, HD_ERR_MISMATCH, HD_ERR_TIMEOUT, HD_ERR_FAILED, HD_ERR_MEMORY, HD_ERR_UNDONE
        HD_ERR_NAN, HD_ERR_CLOSED, HD_ERR_INTERRUPT
        HD_TEXT
    int64_t hd_now()
    uint64_t hd_mix(uint64_t, uint64_t)
    uint64_t hd_hash_text(const char*)

cdef extern from "hd_types.h" nogil:
    enum:
        HD_AVG, HD_PREMUL_SUM
        HD_UINT8
    size_t hd_itemsize(int)
    const char* hd_dtype_name(int)
    const char* hd_op_refusal(int op, int dtype)

cdef extern from "hd_mpi_ops.h" nogil:
    int hd_mpi_ops_init()
    void hd_mpi_ops_free()

cdef extern from "hd_buf.h" nogil:
    enum:
        HD_MAX_DIMS

cdef extern from "hd_comm.h" nogil:
    enum:
        HD_COMM_CLOSING, HD_COMM_CLOSED

    ctypedef struct hd_session:
        pass

    ctypedef struct hd_lane:
        int pending

    ctypedef struct hd_comm:
        MPI_Comm mpi
        int rank, size
        uint64_t uid
        char* name
        double timeout
        int check
        int64_t chunk
        int tag_limit
        uint32_t seq, agreed, carried, packed
        int64_t unread
        hd_session* session
        int* node_slot
        int one_node, freed, closing, replaced
        void* page
        hd_lane lane
        int64_t node_limit
        int on_device

cdef extern from "hd_kernels.h" nogil:
    void* hd_reduce_kernel(int, int)

cdef extern from "hd_node.h" nogil:
    ctypedef struct hd_spot:
        uint64_t block
        int64_t at

cdef extern from "hd_block.h" nogil:
    ctypedef struct hd_block:
        pass

    void hd_block_return(hd_block*)
    char* hd_block_part(const hd_block*, int)
    int hd_block_holds(hd_comm*, const char*, int64_t, hd_spot*)
    hd_block* hd_block_ref(hd_comm*, uint64_t)
    void hd_block_unref(hd_block*)
    int hd_block_whole(const hd_block*, int)
    int hd_block_accumulate(hd_comm*, hd_job*, hd_block*, int, const char*, char*, int64_t)

cdef extern from "hd_kinds.h" nogil:
    enum:
        HD_BARRIER, HD_ALL_REDUCE, HD_REDUCE, HD_REDUCE_SCATTER, HD_BROADCAST, HD_ALL_GATHER, HD_GATHER
        HD_SCATTER, HD_ALL_TO_ALL, HD_SEND, HD_RECV

cdef extern from "hd_job.h" nogil:
    enum:
        HD_SITE, HD_DEVICE_LEAST
        HD_QUEUED, HD_RUNNING, HD_DONE
        HD_WINDOW_REQUEST, HD_WINDOW_BRINGS, HD_WINDOW_FETCHES, HD_WINDOW_ANSWER
        HD_OBJECTS, HD_SIGNAL, HD_ANNOUNCEMENT, HD_PIECE

    ctypedef struct hd_seg:
        char* ptr
        int64_t n
        uint64_t form

    enum:
        HD_REFUSED_RANKS
    ctypedef struct hd_refused:
        int n
        int* ranks
        char* text
    ctypedef struct hd_refusal:
        const char* why
        int code, if_agreed
        uint32_t after
    ctypedef struct hd_message:
        int peer, tag, tag_kind, source, on_device
    ctypedef struct hd_job:
        int kind
        const char* api
        uint64_t api_hash
        uint32_t site_id
        uint16_t name_id
        int dtype, redop, root
        double factor
        int64_t count, extra
        const char* extra_is
        uint64_t layout
        int pairwise, uneven, permuted, listed, async_may_differ, all_async, closing, monitored
        int nin, nout
        hd_seg* in_ "in"
        hd_seg* out
        hd_seg in1, out1
        char* scratch
        hd_block** new_block
        hd_refusal refusal
        hd_refused* refused
        int ndim
        int64_t* dims
        double timeout
        int64_t begun
        int inline_
        hd_message message
        uint32_t seq
        int code
        char* text
        char* site
        hd_comm* comm
        int refs, watched, seen
        void* keep
        void* group
        void* room
        hd_job* next
        hd_job** at

    ctypedef struct hd_hooks:
        void (*site)(hd_job*) noexcept
        int (*slow)(hd_job*) noexcept
        int (*alone)() noexcept
        int (*several)() noexcept
        void (*release)(hd_job*) noexcept nogil
        void (*notify)(hd_job*) noexcept nogil

    hd_hooks hd_py

    const char* hd_kind_name(int)
    void hd_job_init(hd_job*, hd_comm*, int kind, const char* api)
    void hd_job_clear(hd_job*)
    int hd_job_state(const hd_job*)
    void hd_job_unref(hd_job*)
    int hd_job_wait(hd_job*, double)

cdef extern from "hd_recorder.h" nogil:
    ctypedef struct hd_record:
        pass

    struct hd_recorder:
        hd_record* ring
        uint32_t drops

    hd_recorder hd_rec

    void hd_rec_begin(hd_job*, int queued)
    void hd_rec_end(hd_job*)
    uint16_t hd_rec_name(const char*)
    uint32_t hd_rec_site(int line, const char* function, const char* file)

cdef extern from "hd_beside.h" nogil:
    ctypedef struct hd_beside:
        void (*put)(hd_beside*) noexcept
    void hd_beside_part(hd_beside*)

cdef extern from "hd_beside.h":
    hd_beside* hd_beside_new(hd_comm*, const char*, const int*, uint32_t (*site)() noexcept)

cdef extern from "hd_late.h" nogil:
    void hd_late_wish(double share, double seconds)

cdef extern from "hd_recorder_file.h" nogil:
    void hd_rec_wish(int, const char*)
    void hd_rec_recovered(int, int64_t)
    void hd_rec_returned(int64_t)
    const char* hd_rec_path()
    void hd_rec_leave()
    void hd_rec_remove()
    int hd_rec_dump()
    int hd_rec_dump_to(const char*)

cdef extern from "hd_stacks.h" nogil:
    void hd_stacks_open(int fd, int number, int native, int (*python)(int) noexcept)
    void hd_stacks_close()

cdef extern from "hd_hang.h" nogil:
    void hd_hang_wish(int)
    void hd_hang_on_signal(int)
    void hd_hang_report(hd_session*, const char*, int)

cdef extern from "hd_notify.h" nogil:
    int hd_job_watch(hd_job*)
    void hd_job_settle(const hd_job*)
    void hd_notify_push(hd_job*)
    hd_job* hd_notify_next()
    void hd_notify_stop()

cdef extern from "hd_alias.h" nogil:
    ctypedef struct hd_own:
        int first, step, exact

    int hd_overlap(const hd_seg*, int, int64_t, int*, int*)
    int hd_input_in_output(const hd_seg*, int, const hd_seg*, int, int64_t, hd_own, int*, int*)

cdef extern from "hd_reductions.h" nogil:
    int hd_scratch_for(const hd_comm*, hd_job*)

cdef extern from "hd_node.h" nogil:
    int64_t hd_node_bytes(const hd_comm*)

cdef extern from "hd_levels.h" nogil:
    int64_t hd_levels_bytes(const hd_comm*)

cdef extern from "hd_post.h" nogil:
    int hd_post_by_nodes(const hd_comm*)

cdef extern from "hd_threads.h" nogil:
    int hd_session_serialized(const hd_session*)

cdef extern from "hd_status.h" nogil:
    void hd_session_begin(hd_session*)
    void hd_session_set_leaving(hd_session*)
    void hd_session_set_failing(hd_session*, const char*)

cdef extern from "hd_cpus.h":
    ctypedef struct hd_quota:
        double cores
        uint64_t group

cdef extern from "hd_session_life.h" nogil:
    int hd_session_open(MPI_Comm, double, hd_quota, hd_session**, char*, size_t)
    int hd_session_opening()
    void hd_session_opened()
    void hd_session_unref(hd_session*)
    int hd_session_size(const hd_session*)
    int hd_session_active(const hd_session*)
    int hd_session_rank(const hd_session*)
    int hd_session_machine(const hd_session*)
    void hd_session_cpus(const hd_session*, int*, int*)

cdef extern from "hd_ft.h" nogil:
    const char* hd_ft_missing()
    void hd_ft_want(int)
    int hd_ft_on(const hd_session*)
    void hd_ft_why(const hd_session*, char*, size_t)
    int hd_ft_lost(const hd_session*, int*, int)
    void hd_ft_committed(hd_session*)

cdef extern from "hd_status.h" nogil:
    int hd_session_broken(const hd_session*)

cdef extern from "hd_recover.h" nogil:
    int hd_comm_agree(hd_comm*, int*, double, char*, size_t)
    int hd_comm_recover(hd_comm*, const char*, double, hd_quota, int*, hd_comm**, int*, int*, char*, size_t)
    int hd_comm_set_aside(hd_comm*, int, const char*, hd_comm**, char*, size_t)

cdef extern from "hd_remake.h" nogil:
    int hd_comm_exchange(hd_comm*, const void*, int, char**, int*)
    int hd_comm_remake(hd_comm*, const int*, int, const char*, double, int, hd_comm**, char*, size_t)

cdef extern from "hd_spares.h" nogil:
    enum: HD_REBUILDS, HD_LOSES
    void hd_spares_want(int)
    int hd_spares_has(const hd_session*)
    int hd_spares_is(const hd_session*)
    void hd_spares_farewell(hd_session*, double)

cdef extern from "hd_page_life.h" nogil:
    enum: HD_KEEP, HD_TOGETHER, HD_LATER
    enum hd_closed: HD_DESTROYED, HD_DROPPED
    int64_t HD_UNDRAINED
    void hd_page_mark(hd_comm*, int64_t, hd_closed)
    int hd_page_leave(hd_comm*, int64_t, double)

cdef extern from "hd_nan.h" nogil:
    int hd_nan_wanted
    void hd_nan_wish(int)
    int hd_nan_fail_alone(hd_job*, const char*)

cdef extern from "hd_lane.h" nogil:
    int hd_lane_try(hd_comm*)
    void hd_lane_leave(hd_comm*)
    void hd_lane_run(hd_comm*, hd_job*)
    int hd_lane_submit(hd_comm*, hd_job*)
    int hd_lane_take_back(hd_comm*, hd_job*)
    void hd_lane_seen(hd_comm*)
    void hd_lane_give_up(hd_comm*)
    int hd_lane_drain(hd_comm*, double)

cdef extern from "hd_envelope.h" nogil:
    int hd_p2p_unfinished(const hd_job*)

cdef extern from "hd_p2p.h" nogil:
    int hd_p2p_start(hd_comm*, hd_job*)
    int hd_p2p_test(hd_job*)
    bint hd_p2p_is_brief(const hd_job*)
    int hd_p2p_soon(hd_job*)
    int hd_p2p_wait(hd_job*, double, int)
    int hd_p2p_take_back(hd_job*, double)
    void hd_p2p_give_up(hd_job*)

cdef extern from "hd_peer.h" nogil:
    int hd_peer_has_withdrawn(const hd_comm*, int)
    void hd_peer_withdrawn(hd_job*, int)

cdef extern from "hd_poller.h" nogil:
    void hd_p2p_watch(hd_job*)
    int hd_p2p_unwatch(hd_job*)
    int hd_p2p_drain(hd_comm*, double)
    void hd_p2p_recall(hd_comm*)
    int hd_p2p_close(hd_comm*)
    int hd_p2p_shutdown()

cdef extern from "hd_window.h" nogil:
    enum:
        HD_PUT, HD_GET, HD_ACCUMULATE
        HD_SERVED, HD_NOT_THERE, HD_OUT_OF_RANGE, HD_NO_ROOM, HD_DATA_LOST
        HD_WINDOW_SHORT

    ctypedef struct hd_exposed:
        pass

    ctypedef struct hd_request:
        uint64_t window, number
        int64_t at, bytes
        int32_t call, dtype, redop, tag

    ctypedef struct hd_answer:
        uint64_t number
        int32_t outcome

    hd_exposed* hd_window_expose(hd_comm*, uint64_t, char*, int64_t)
    int hd_window_withdraw(hd_exposed*)
    void hd_window_free(hd_exposed*)
    int hd_windows_shutdown()

cdef extern from "hd_last_words.h" nogil:
    void hd_abort_tell(int)

cdef extern from "hd_early.h" nogil:
    void hd_arm_early()

cdef extern from "hd_pmi.h" nogil:
    int hd_pmi_answer(int)

cdef extern from "hd_pmi_relay.h" nogil:
    void hd_pmi_relay_begin()
    void hd_pmi_relay_end()

cdef extern from "hd_abort.h" nogil:
    void hd_abort(int, const char*)
    void hd_failing(double)

cdef extern from "hd_exit.h" nogil:
    int hd_finalized
    void hd_arm_exit(int)
    void hd_exit_before_finalize()
    void hd_exit_mark(const char*, int, int)
    int hd_in_child()
    void hd_session_poisoned(hd_session*)
    void hd_exit_unmet(int)

cdef extern from "hd_comm_life.h" nogil:
    int hd_comm_open(MPI_Comm, hd_session*, const char*, double, int, hd_comm**, char*, size_t)
    int hd_comm_create_group(hd_comm*, const int*, int, int, const char*, double, int, int*, hd_comm**, char*, size_t)
    int hd_comm_enter(hd_comm*, int)
    void hd_comm_exit(hd_comm*)
    void hd_comm_close(hd_comm*, int)
    int hd_comm_drain(hd_comm*, double)
    int hd_comm_free(hd_comm*, int, int)
    int64_t hd_comm_unread(hd_comm*)
    void hd_comm_release(hd_comm*)

cdef extern from "hd_graves.h" nogil:
    void hd_grave_tell(hd_comm*)
