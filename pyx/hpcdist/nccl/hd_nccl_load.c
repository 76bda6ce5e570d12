/* Opens libnccl.so.2 and finds its functions. */
#define _GNU_SOURCE
#include "hd_nccl.h"

#include <dlfcn.h>
#include <stdio.h>

#define USUAL_NAME "libnccl.so.2"

const char *hd_nccl_open(hd_nccl *table, const char *path, int load, int *found, const char **where)
{
    static char problem[512];
    Dl_info about;
    void *handle =
        dlopen(path ? path : USUAL_NAME, RTLD_NOW | RTLD_LOCAL | (load ? 0 : RTLD_NOLOAD));
    const char *said = handle ? NULL : dlerror();

    *found = handle != NULL;
    if (!handle) {
        snprintf(problem, sizeof problem, "%s", said ? said : "it is not loaded");
        return problem;
    }
#define TAKE(member, symbol, arguments) *(void **)&table->member = dlsym(handle, #symbol);
#define NEED(member, symbol, arguments)                                                            \
    TAKE(member, symbol, arguments)                                                                \
    if (!table->member) {                                                                          \
        snprintf(problem, sizeof problem,                                                          \
                 "it has no " #symbol ", which NCCL 2.18 and newer have");                         \
        return problem;                                                                            \
    }
    NEED(error_string, ncclGetErrorString, )
    NEED(last_error, ncclGetLastError, )
    HD_NCCL_REQUIRED(NEED)
    HD_NCCL_OPTIONAL(TAKE)
    *where = dladdr((void *)table->get_version, &about) && about.dli_fname ? about.dli_fname
                                                                           : USUAL_NAME;
    return NULL;
}
