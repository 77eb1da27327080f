#define _GNU_SOURCE
#include "team.h"
#include <dlfcn.h>
#include <stddef.h>
#include <sys/types.h>
#include <unistd.h>

/* A forked child has no team, though its runtime believes that it has. */
static pid_t loaded_by;

__attribute__((constructor)) static void note_process(void) {
    loaded_by = getpid();
}

int lk_team_find(lk_team *out) {
    if (getpid() != loaded_by)
        return 0;
    /* Looked up through torch's own library: a process may have several runtimes. */
    void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == NULL)
        return 0;
    *(void **)&out->parallel = dlsym(torch, "GOMP_parallel");
    *(void **)&out->thread_num = dlsym(torch, "omp_get_thread_num");
    *(void **)&out->max_threads = dlsym(torch, "omp_get_max_threads");
    *(void **)&out->in_parallel = dlsym(torch, "omp_in_parallel");
    dlclose(torch); /* torch holds it, too, and is never unloaded */
    return out->parallel && out->thread_num && out->max_threads && out->in_parallel;
}

int lk_team_is_free(const lk_team *team, int num_threads) {
    return team->max_threads() == num_threads && !team->in_parallel();
}
