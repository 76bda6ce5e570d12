/* What the engine's files ask of a session and of MPI, where a program has neither: nobody has gone, every wait
 * may spin, and an error is a number. A program may define any of these itself. */
#include <stdio.h>
#include <string.h>

#include "hd_ft.h"
#include "hd_hang.h"
#include "hd_hydra.h"
#include "hd_last_words.h"
#include "hd_late.h"
#include "hd_nan.h"
#include "hd_pairs.h"
#include "hd_process.h"
#include "hd_prte.h"
#include "hd_recorder_file.h"
#include "hd_stacks.h"
#include "hd_status.h"
#include "hd_stopped.h"
#include "hd_threads.h"

#define STUB __attribute__((weak))

STUB int MPI_Finalized(int *flag) { return *flag = 0; }
STUB int hd_session_serialized(const hd_session *s) { return (void)s, 0; }
STUB int hd_session_spin(const hd_session *s, int lane) { return (void)s, (void)lane, 0; }
STUB void hd_session_progress(hd_session *s) { (void)s; }
STUB void hd_session_enter(hd_session *s, const hd_job *j) { (void)s, (void)j; }
STUB void hd_session_leave(hd_session *s) { (void)s; }
STUB void hd_hang_expect(hd_session *s, double left) { (void)s, (void)left; }
STUB void hd_hang_look(hd_session *s) { (void)s; }
STUB void hd_hang_report(hd_session *s, const char *why, int watchdog) { (void)s, (void)why, (void)watchdog; }
STUB void hd_hang_say_where(hd_session *s, int slot, hd_text *t) { (void)s, (void)slot, (void)t; }
STUB void hd_tell(const char *line) { (void)line; }
STUB void hd_late_look(hd_session *s, int64_t now, hd_text *t) { (void)s, (void)now, (void)t; }
STUB void hd_late_waited(hd_comm *c, const hd_job *j, int rank, int64_t ns, int more)
{
    (void)c, (void)j, (void)rank, (void)ns, (void)more;
}
STUB int hd_nan_wanted;
STUB void hd_nan_look_at_send(hd_job *j) { (void)j; }
STUB void hd_nan_fail_message(hd_job *j) { (void)j; }
STUB int hd_hydra_gone(void) { return 0; }
STUB int hd_prte_gone(void) { return 0; }
STUB void hd_rec_dump_failed(void) {}
STUB void hd_stacks_answer(void) {}
STUB void hd_session_note(hd_session *s, const hd_job *j) { (void)s, (void)j; }
STUB enum hd_gone hd_session_gone(hd_session *s, int slot) { return (void)s, (void)slot, HD_HERE; }
STUB int hd_session_broken(const hd_session *s) { return (void)s, 0; }
STUB int hd_ft_on(const hd_session *s) { return (void)s, 0; }
STUB int hd_ft_explains(hd_session *s, int error) { return (void)s, (void)error, 0; }
STUB int hd_ft_say_failed(const hd_comm *c, int error, hd_text *t) { return (void)c, (void)error, (void)t, 0; }
STUB void hd_ft_hear(hd_session *s) { (void)s; }
STUB int hd_ft_pending(int error) { return (void)error, 0; }
STUB void hd_ft_say_why(const hd_session *s, hd_text *t) { (void)s, (void)t; }
STUB void hd_ft_lose(hd_session *s, int rank) { (void)s, (void)rank; }
STUB void hd_ft_break(hd_session *s) { (void)s; }
STUB void hd_ft_look(hd_session *s) { (void)s; }
STUB int hd_ft_told(const hd_session *s) { return (void)s, 0; }
STUB char hd_process_state(pid_t pid) { return (void)pid, 0; }
STUB void hd_stopped_look(hd_session *s) { (void)s; }
STUB int64_t hd_stopped_end(hd_session *s) { return (void)s, 0; }
STUB void hd_session_report(hd_session *s, int slot, hd_text *t) { (void)s, hd_say(t, "slot %d", slot); }
STUB void hd_session_blocked(hd_session *s, const hd_comm *c, uint32_t n, double left)
{
    (void)s, (void)c, (void)n, (void)left;
}
STUB uint32_t hd_session_crossed(hd_session *s, const hd_comm *c, int slot, const char **where)
{
    return (void)s, (void)c, (void)slot, (void)where, 0;
}
STUB void hd_mpi_lock(const hd_session *s) { (void)s; }
STUB void hd_mpi_unlock(const hd_session *s) { (void)s; }
STUB int64_t hd_agreed(const hd_job *j) { return j->count; }

STUB int MPI_Error_class(int rc, int *class) { return *class = rc, 0; }
STUB int MPI_Error_string(int rc, char *text, int *length)
{
    *length = snprintf(text, MPI_MAX_ERROR_STRING, "error %d", rc);
    return 0;
}
