/* Drives the engine from several threads with random requests and compares every byte with a plain model.
 *
 * usage: exercise threads|uring FILE SECONDS SEED FAULTS(0|1)
 *
 * The file is dealt out to the threads in stripes whose borders lie in the middle of blocks, so that
 * neighbours rewrite parts of the same blocks all the time. With FAULTS the calls that the threads driver
 * makes (pread, pwrite; linked with --wrap) are interrupted, cut short, told to try again and failed at
 * random, and so are the completions that the ring driver gets: a request that failed is repeated, and what
 * it says it moved is checked.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef LAMINA_HAVE_URING
#include <liburing.h>
#endif

#include "clock.h"
#include "engine.h"
#include "file.h"
#include "probe.h"
#include "stats.h"
#include "transfer.h"

#define NUM_THREADS 4
#define STRIPE 100003u /* a prime */
#define NUM_STRIPES 16u
#define SIZE (STRIPE * NUM_STRIPES)
#define MAX_EXTENTS 4

static atomic_int faults_on;
static atomic_ullong fault_state = 88172645463325252ull;
static atomic_ullong num_faults, num_transfers, num_cancelled;

static uint64_t step(uint64_t *state) {
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}

ssize_t __real_pread(int fd, void *buffer, size_t nbytes, off_t offset);
ssize_t __real_pwrite(int fd, const void *buffer, size_t nbytes, off_t offset);

/* What is to go wrong now: 0 nothing, or an errno, or -1: a short transfer. */
static int fault(void) {
    if (!atomic_load(&faults_on))
        return 0;
    uint64_t dice = atomic_fetch_add(&fault_state, 0x9e3779b97f4a7c15ull);
    dice = step(&dice) >> 20;
    atomic_fetch_add(&num_faults, dice % 64 < 24);
    switch (dice % 64) {
    case 0:
        return EIO;
    case 1 ... 7:
        return EINTR;
    case 8:
        return EAGAIN;
    case 9 ... 23:
        return -1;
    default:
        return 0;
    }
}

ssize_t __wrap_pread(int fd, void *buffer, size_t nbytes, off_t offset) {
    int what = fault();
    if (what > 0) {
        errno = what;
        return -1;
    }
    /* Cut short in units that direct I/O can be cut in. */
    return __real_pread(fd, buffer, what && nbytes > 4096 ? nbytes / 2 / 512 * 512 : nbytes, offset);
}

ssize_t __wrap_pwrite(int fd, const void *buffer, size_t nbytes, off_t offset) {
    int what = fault();
    if (what > 0) {
        errno = what;
        return -1;
    }
    return __real_pwrite(fd, buffer, what && nbytes > 4096 ? nbytes / 2 / 512 * 512 : nbytes, offset);
}

#ifdef LAMINA_HAVE_URING
unsigned __real_io_uring_peek_batch_cqe(struct io_uring *ring, struct io_uring_cqe **cqes, unsigned count);

/* The transfer has been carried out; that it is told otherwise changes no byte that it may not change. */
unsigned __wrap_io_uring_peek_batch_cqe(struct io_uring *ring, struct io_uring_cqe **cqes, unsigned count) {
    unsigned found = __real_io_uring_peek_batch_cqe(ring, cqes, count);
    for (unsigned i = 0; i < found; i++) {
        int what = io_uring_cqe_get_data(cqes[i]) && cqes[i]->res > 0 ? fault() : 0;
        if (what > 0)
            cqes[i]->res = -what;
        else if (what && cqes[i]->res > 4096)
            cqes[i]->res = cqes[i]->res / 2 / 512 * 512;
    }
    return found;
}
#endif

struct worker {
    struct lamina_engine *engine;
    int64_t file;
    uint32_t number;
    uint64_t random;
    uint64_t end_ns;
    unsigned char *model; /* the whole file; this worker's stripes only */
};

static void check(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "exercise: %s (errno %d)\n", what, errno);
        _exit(1);
    }
}

/* A random range inside of one random stripe of this worker's. */
static void choose(struct worker *w, uint64_t *offset, uint64_t *nbytes) {
    uint64_t stripe = step(&w->random) % (NUM_STRIPES / NUM_THREADS) * NUM_THREADS + w->number;
    uint64_t from = step(&w->random) % STRIPE, most = STRIPE - from;
    uint64_t length = step(&w->random) % 3 ? step(&w->random) % most + 1 : step(&w->random) % 64 + 1;
    *offset = stripe * STRIPE + from;
    *nbytes = length < most ? length : most;
}

/* Repeats the extents until they succeed, now and then with a cancel; returns when all bytes are where they
 * belong. */
static void transfer(struct worker *w, struct lamina_extent *extents, uint32_t count) {
    struct lamina_result result;
    do {
        int priority = (int)(step(&w->random) % 3);
        struct lamina_transfer *t =
            count == 1 && step(&w->random) % 2
                ? lamina_perform(w->engine, extents->file, extents->operation, extents->address,
                                 extents->nbytes, extents->offset, priority)
                : lamina_submit(w->engine, extents, count, priority);
        check(t != NULL, "submit");
        if (step(&w->random) % 8 == 0)
            atomic_fetch_add(&num_cancelled, (unsigned)lamina_transfer_cancel(t));
        int64_t timeout = step(&w->random) % 4 ? -1 : 1000;
        while (lamina_transfer_wait(t, timeout))
            timeout = step(&w->random) % 2 ? -1 : 100000;
        lamina_transfer_result(t, &result);
        check(result.error == 0 || result.error == EIO || result.error == ECANCELED || result.error == EAGAIN,
              "unexpected error");
        check(result.got <= result.wanted && (result.error || result.got == result.wanted), "short");
        lamina_transfer_release(t);
        atomic_fetch_add(&num_transfers, 1);
    } while (result.error);
}

static void *work(void *argument) {
    struct worker *w = argument;
    unsigned char *memory = malloc(MAX_EXTENTS * (STRIPE + 1));
    check(memory != NULL, "malloc");
    while (now_ns() < w->end_ns) {
        struct lamina_extent extents[MAX_EXTENTS];
        uint32_t count = (uint32_t)(step(&w->random) % MAX_EXTENTS) + 1, writing = step(&w->random) % 2;
        for (uint32_t i = 0; i < count; i++) {
            uint64_t offset, nbytes;
            choose(w, &offset, &nbytes);
            for (uint32_t k = 0; writing && k < i; k++) /* one extent's bytes must not be another's */
                if (offset < extents[k].offset + extents[k].nbytes && extents[k].offset < offset + nbytes)
                    nbytes = 0;
            unsigned char *part = memory + i * (STRIPE + 1) + step(&w->random) % 2;
            extents[i] =
                (struct lamina_extent){.file = w->file, .address = part, .nbytes = nbytes, .offset = offset};
            extents[i].operation = writing ? LAMINA_WRITE : LAMINA_READ;
            for (uint64_t b = 0; b < nbytes; b++)
                part[b] = writing ? (unsigned char)step(&w->random) : 0;
            if (writing)
                memcpy(w->model + offset, part, nbytes);
        }
        transfer(w, extents, count);
        for (uint32_t i = 0; i < count && !writing; i++)
            check(!memcmp(extents[i].address, w->model + extents[i].offset, extents[i].nbytes),
                  "read differs");
        if (step(&w->random) % 64 == 0) {
            struct lamina_extent sync = {.file = w->file, .operation = LAMINA_FDATASYNC};
            transfer(w, &sync, 1);
        }
    }
    free(memory);
    return NULL;
}

static void open_file(const char *path, struct lamina_file_spec *spec) {
    struct lamina_probe probe = {0};
    struct stat status;
    spec->buffered_fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    check(spec->buffered_fd >= 0 && !ftruncate(spec->buffered_fd, SIZE) && !fstat(spec->buffered_fd, &status),
          "open");
    spec->device = status.st_dev;
    spec->fd = open(path, O_RDWR | O_DIRECT);
    spec->direct = spec->fd >= 0 && !lamina_probe_direct(spec->fd, &probe) && probe.offset_align;
    spec->offset_align = probe.offset_align;
    spec->memory_align = probe.memory_align;
    if (!spec->direct) {
        if (spec->fd >= 0)
            close(spec->fd);
        spec->fd = spec->buffered_fd;
        spec->buffered_fd = -1;
    }
}

static void compare(const char *path, const unsigned char *model) {
    unsigned char *back = malloc(SIZE + 1);
    FILE *file = fopen(path, "rb");
    check(back && file && fread(back, 1, SIZE + 1, file) == SIZE, "the file's length has changed");
    check(!memcmp(back, model, SIZE), "the file differs from the model");
    fclose(file);
    free(back);
}

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    struct lamina_config config = {.driver = strcmp(argv[1], "uring") ? LAMINA_THREADS : LAMINA_URING,
                                   .queue_depth = 8,
                                   .num_threads = 6,
                                   .inline_bytes = 8192,
                                   .bounce_blocks = 4,
                                   .use_fixed = 1,
                                   .block_bytes = 12288,
                                   .bounce_block_bytes = 8192,
                                   .max_inflight_bytes = 40000};
    int error;
    struct lamina_engine *engine = lamina_engine_open(&config, &error);
    errno = error;
    check(engine != NULL, "engine");
    struct lamina_file_spec spec;
    open_file(argv[2], &spec);
    int64_t file = lamina_file_add(engine, &spec);
    check(file > 0, "file");
    unsigned char *model = calloc(1, SIZE);
    struct worker workers[NUM_THREADS];
    pthread_t threads[NUM_THREADS];
    atomic_store(&faults_on, atoi(argv[5]));
    for (uint32_t i = 0; i < NUM_THREADS; i++) {
        workers[i] = (struct worker){.engine = engine, .file = file, .number = i, .model = model};
        workers[i].random = strtoull(argv[4], NULL, 10) * 7919 + i + 1;
        workers[i].end_ns = now_ns() + (uint64_t)(atof(argv[3]) * 1e9);
        check(!pthread_create(&threads[i], NULL, work, &workers[i]), "thread");
    }
    for (uint32_t i = 0; i < NUM_THREADS; i++)
        pthread_join(threads[i], NULL);
    atomic_store(&faults_on, 0);
    struct lamina_device_stats stats;
    check(lamina_stats(engine, &stats, 1) == 1 && stats.inflight == 0 && stats.inflight_bytes == 0, "stats");
    check(stats.max_inflight_bytes <= config.max_inflight_bytes, "more bytes in flight than allowed");
    check(!lamina_file_remove(engine, file) && lamina_file_remove(engine, file) == -EBADF, "remove");
    check(!lamina_engine_close(engine, 0), "close");
    lamina_engine_free(engine);
    compare(argv[2], model);
    free(model);
    printf("%llu transfers, %llu cancelled, %llu faults, %llu pieces\n", (unsigned long long)num_transfers,
           (unsigned long long)num_cancelled, (unsigned long long)num_faults,
           (unsigned long long)(stats.read.operations + stats.write.operations));
    return 0;
}
