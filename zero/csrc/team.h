/* The OpenMP team that torch computes with, found in the running process: nothing is linked.
 *
 * [Note: Team] Between two of its jobs an OpenMP worker waits awake, for milliseconds, on the core where it
 * runs.  Threads of our own that are woken meanwhile share that core with it, and when the next job comes its
 * worker shares it with ours.  A caller whose thread has a team therefore does better to use it: nobody is
 * woken, nobody waits for a core.  Functions are called by the names that gcc's compiled code uses, which
 * every OpenMP runtime has that torch is built with. */
#ifndef LAMINA_TEAM_H
#define LAMINA_TEAM_H

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned num_threads, unsigned flags);
    int (*thread_num)(void);
    int (*max_threads)(void);
    int (*in_parallel)(void);
} lk_team;

/* 1 when torch is in this process and its runtime has all of these. */
int lk_team_find(lk_team *out);
/* 1 when the calling thread's team, waiting for a job, has just so many threads: another number would end
 * some of them or start new ones. */
int lk_team_is_free(const lk_team *team, int num_threads);
#endif
