/* The stacks of this process: see hd_stacks.h.
 *
 * Python's frames change while its threads run, so a helper thread first asks for the GIL, and
 * reads them while it has it. A thread that computes gives the GIL away every 5 ms. One that does
 * not within a second may wait in C code, so that the frames stand still: then they are read
 * without the GIL, by faulthandler's handler of a signal, as at a crash. But the second may also be
 * over because the cores are busy, or that thread goes on just now, and frames that are read while
 * they change are a crash. So this is done only while all threads sleep, and by a child that shares
 * this memory: should one wake up meanwhile, the child crashes, and the job goes on. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_recorder.h"
#include "hd_stacks.h"

#define PATIENCE 1000000000 /* ns to wait for the GIL */
#define LOOKS 5             /* at all threads, which must sleep each time */
#define TRIES 8             /* to find them so */

#define CHILDS_STACK (128 << 10) /* bytes: a signal's frame alone may take 11 KB */
#define FRAMES 64
#define HELPER "hpcdist-stacks" /* the thread's name */

static int own_fd = -1, own_signal, native_signal;
static void *frames[FRAMES];
static int depth; /* atomic: frames there; -1: not yet */
static int (*write_python)(int fd);
static int helping; /* atomic: a helper runs, or waits for the GIL */
static int helped;  /* atomic: the last helper's result; -1: not yet */

static void on_native(int number)
{
    (void)number;
    __atomic_store_n(&depth, backtrace(frames, FRAMES), __ATOMIC_RELEASE);
}

void hd_stacks_open(int fd, int number, int native, int (*python)(int))
{
    struct sigaction now, ours = {.sa_handler = on_native, .sa_flags = SA_RESTART | SA_ONSTACK};
    own_fd = fd;
    own_signal = number;
    backtrace(frames, 1); /* loads what it needs, which a handler may not */
    if (native && sigaction(native, NULL, &now) == 0 && now.sa_handler == SIG_DFL &&
        sigaction(native, &ours, NULL) == 0)
        native_signal = native;
    __atomic_store_n(&write_python, python, __ATOMIC_RELEASE);
}

void hd_stacks_close(void)
{
    __atomic_store_n(&write_python, NULL, __ATOMIC_RELEASE);
    own_signal = 0;
}

static void *help(void *arg)
{
    int (*python)(int) = __atomic_load_n(&write_python, __ATOMIC_ACQUIRE);
    (void)arg;
    prctl(PR_SET_NAME, HELPER);
    __atomic_store_n(&helped, python ? python(own_fd) : 1, __ATOMIC_RELEASE);
    __atomic_store_n(&helping, 0, __ATOMIC_RELEASE);
    return NULL;
}

/* 1: the Python stacks are in the file. */
static int with_the_gil(void)
{
    const int64_t until = hd_now() + PATIENCE;
    pthread_t thread;
    int idle = 0;
    if (!__atomic_compare_exchange_n(&helping, &idle, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return 0; /* the last one still waits for the GIL */
    __atomic_store_n(&helped, -1, __ATOMIC_RELEASE);
    if (pthread_create(&thread, NULL, help, NULL)) {
        __atomic_store_n(&helping, 0, __ATOMIC_RELEASE);
        return 0;
    }
    pthread_detach(thread);
    while (__atomic_load_n(&helped, __ATOMIC_ACQUIRE) < 0 && hd_now() < until) {
        const struct timespec nap = {0, 1000000};
        nanosleep(&nap, NULL);
    }
    return __atomic_load_n(&helped, __ATOMIC_ACQUIRE) == 0;
}

/* ---- without the GIL ---- */

static void read_line(const char *tid, const char *file, char *to, size_t room)
{
    char name[64];
    ssize_t n = -1;
    int fd;
    snprintf(name, sizeof name, "/proc/self/task/%.16s/%s", tid, file);
    if ((fd = open(name, O_RDONLY | O_CLOEXEC)) >= 0) {
        n = read(fd, to, room - 1);
        close(fd);
    }
    to[n > 0 ? n : 0] = 0;
    to[strcspn(to, "\n")] = 0;
}

/* Whether a thread runs, or wants to, that may have the GIL: of hpcdist's only the helper. */
static int any_runs(void)
{
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *task;
    char comm[32], stat[256];
    int found = !tasks;
    while (tasks && !found && (task = readdir(tasks))) {
        const char *state;
        if (task->d_name[0] == '.' || atoi(task->d_name) == (int)syscall(SYS_gettid))
            continue;
        read_line(task->d_name, "comm", comm, sizeof comm);
        if (strncmp(comm, "hpcdist-", 8) == 0 && strcmp(comm, HELPER) != 0)
            continue;
        read_line(task->d_name, "stat", stat, sizeof stat);
        state = strrchr(stat, ')');
        found = state && state[1] && (state[2] == 'R' || state[2] == 'D');
    }
    if (tasks)
        closedir(tasks);
    return found;
}

static int all_sleep(void)
{
    const struct timespec nap = {0, 4000000};
    for (int look = 0; look < LOOKS; look++) {
        if (any_runs())
            return 0;
        nanosleep(&nap, NULL);
    }
    return !any_runs();
}

static void on_fault(int number)
{
    (void)number;
    _exit(1);
}

/* The child: it has handlers of its own. A fault must not dump core, for which kernels before 5.16
 * kill all processes with this memory. */
static int read_frames(void *arg)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
    sigset_t heard;
    (void)arg;
    sigemptyset(&heard);
    sigaddset(&heard, own_signal);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        signal(faults[i], on_fault);
        sigaddset(&heard, faults[i]);
    }
    pthread_sigmask(SIG_UNBLOCK, &heard, NULL);
    kill(getpid(), own_signal); /* returns after the handler */
    return 0;
}

/* Lets a child read the frames while this thread waits. No copy is made of the memory: devices may
 * write to it. No signal tells of the child's end, and no wait of the program's finds it. */
static int frames_read(void)
{
    static char stack[CHILDS_STACK] __attribute__((aligned(64)));
    int status = -1;
    const pid_t child = clone(read_frames, stack + sizeof stack, CLONE_VM | CLONE_VFORK, NULL);
    if (child > 0)
        while (waitpid(child, &status, __WALL) < 0 && errno == EINTR)
            ;
    return status == 0;
}

/* 1: the Python stacks are in the file; -1: by the helper, after all. */
static int without_the_gil(void)
{
    int tries = TRIES;
    if (!own_signal)
        return 0;
    while (!all_sleep()) {
        const struct timespec nap = {0, 10000000};
        if (__atomic_load_n(&helped, __ATOMIC_ACQUIRE) == 0)
            return -1;
        if (!--tries)
            return 0;
        nanosleep(&nap, NULL);
    }
    if (__atomic_load_n(&helped, __ATOMIC_ACQUIRE) == 0)
        return -1;
    return frames_read();
}

/* The main thread's native stack: it is interrupted for some microseconds. */
static void write_native(void)
{
    const int64_t until = hd_now() + PATIENCE / 5;
    __atomic_store_n(&depth, -1, __ATOMIC_RELEASE);
    if (syscall(SYS_tgkill, getpid(), getpid(), native_signal))
        return;
    while (__atomic_load_n(&depth, __ATOMIC_ACQUIRE) < 0 && hd_now() < until) {
        const struct timespec nap = {0, 1000000};
        nanosleep(&nap, NULL);
    }
    if (__atomic_load_n(&depth, __ATOMIC_ACQUIRE) <= 0)
        return;
    dprintf(own_fd, "Main thread, native:\n");
    backtrace_symbols_fd(frames, depth, own_fd);
}

/* ---- the threads, as the kernel sees them ---- */

static void say_threads(hd_text *t)
{
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *task;
    char comm[32], stat[256], channel[64], call[32];
    hd_say(t, "Threads, as the kernel sees them:\n");
    while (tasks && (task = readdir(tasks))) {
        const char *state;
        if (task->d_name[0] == '.')
            continue;
        read_line(task->d_name, "comm", comm, sizeof comm);
        read_line(task->d_name, "stat", stat, sizeof stat);
        read_line(task->d_name, "wchan", channel, sizeof channel);
        read_line(task->d_name, "syscall", call, sizeof call);
        call[strcspn(call, " ")] = 0;
        state = strrchr(stat, ')');
        hd_say(t, "  %s %s: %s", task->d_name, comm,
               !state || !state[1] ? "?"
               : state[2] == 'R'   ? "runs"
               : state[2] == 'S'   ? "sleeps"
               : state[2] == 'D'   ? "waits for a device or file system"
                                   : "is stopped");
        if (channel[0] && strcmp(channel, "0") != 0)
            hd_say(t, " in %s", channel);
        if (call[0] >= '0' && call[0] <= '9')
            hd_say(t, ", system call %s", call);
        hd_say(t, "\n");
    }
    if (tasks)
        closedir(tasks);
}

/* The helper is a thread of its own, without frames. */
static void leave_out_helper(hd_text *t)
{
    const char *after = strstr(t->at, "<no Python frame>\n\n");
    if (strncmp(t->at, "Current thread", 14) == 0 && after) {
        after = strstr(after, "\n\n") + 2;
        t->used -= (size_t)(after - t->at);
        memmove(t->at, after, t->used + 1);
    }
}

static void gather(hd_rec_head *h)
{
    static char buffer[HD_REC_STACKS];
    struct timespec now;
    hd_text t;
    ssize_t n;
    int how;

    hd_text_init(&t, buffer, sizeof buffer);
    if (own_fd >= 0 && __atomic_load_n(&write_python, __ATOMIC_ACQUIRE)) {
        /* The kernel keeps one position for both ends. */
        if (ftruncate(own_fd, 0) == 0)
            lseek(own_fd, 0, SEEK_SET);
        how = with_the_gil() ? -1 : without_the_gil();
        if (native_signal && __atomic_exchange_n(&h->native, 0, __ATOMIC_ACQ_REL))
            write_native();
        n = pread(own_fd, buffer, sizeof buffer - 4096, 0);
        t.used = n > 0 ? (size_t)n : 0;
        buffer[t.used] = 0;
        if (how < 0)
            leave_out_helper(&t);
        else
            hd_say(&t, "(A thread of this process keeps Python's lock%s.)\n",
                   how ? "" : " and runs: the stacks cannot be read");
    }
    say_threads(&t);
    clock_gettime(CLOCK_REALTIME, &now);
    __atomic_store_n(&h->stack_used, 0, __ATOMIC_RELEASE);
    memcpy(hd_rec.stacks, buffer, t.used);
    h->stack_real = now.tv_sec * 1000000000LL + now.tv_nsec;
    __atomic_store_n(&h->stack_used, (uint32_t)t.used, __ATOMIC_RELEASE);
}

void hd_stacks_answer(void)
{
    hd_rec_head *h = hd_rec.head;
    uint32_t ask;
    if (!h)
        return;
    ask = __atomic_load_n(&h->ask, __ATOMIC_ACQUIRE);
    if (ask == __atomic_load_n(&h->answered, __ATOMIC_RELAXED))
        return;
    gather(h);
    __atomic_store_n(&h->answered, ask, __ATOMIC_RELEASE);
}
