#include "file.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "clock.h"
#include "core.h"

#define SLOT_BITS 24
#define SLOT_MASK (((int64_t)1 << SLOT_BITS) - 1)

struct file *file_find(struct lamina_engine *e, int64_t number) {
    int64_t slot = number & SLOT_MASK;
    if (number <= 0 || slot >= e->num_files)
        return NULL;
    struct file *file = e->files[slot];
    return file && file->number == number && !file->closing ? file : NULL;
}

static struct device *device_of(struct lamina_engine *e, uint64_t number) {
    for (struct device *d = e->devices; d; d = d->next)
        if (d->number == number)
            return d;
    struct device *device = calloc(1, sizeof *device);
    if (!device)
        return NULL;
    device->number = device->stats.device = number;
    device->since_ns = now_ns();
    device->next = e->devices;
    e->devices = device;
    return device;
}

/* The lowest free slot, or -errno. */
static int64_t free_slot(struct lamina_engine *e) {
    for (uint32_t i = 0; i < e->num_files; i++)
        if (!e->files[i])
            return i;
    if (e->num_files > SLOT_MASK)
        return -EMFILE;
    uint32_t count = e->num_files ? 2 * e->num_files : 16;
    struct file **files = realloc(e->files, count * sizeof *files);
    if (!files)
        return -ENOMEM;
    for (uint32_t i = e->num_files; i < count; i++)
        files[i] = NULL;
    int64_t slot = e->num_files;
    e->files = files;
    e->num_files = count;
    return slot;
}

static int64_t add(struct lamina_engine *e, const struct lamina_file_spec *spec) {
    if (e->closing)
        return -ESHUTDOWN;
    int64_t slot = free_slot(e);
    if (slot < 0)
        return slot;
    struct device *device = device_of(e, spec->device);
    struct file *file = calloc(1, sizeof *file);
    if (!device || !file) {
        free(file);
        return -ENOMEM;
    }
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    file->engine = e;
    file->device = device;
    file->spec = *spec;
    file->write_block = spec->offset_align > page ? spec->offset_align : page;
    file->fixed_slot = -1;
    file->number = ((int64_t)++e->file_generation << SLOT_BITS) | slot;
    e->files[slot] = file;
    return file->number;
}

int64_t lamina_file_add(struct lamina_engine *e, const struct lamina_file_spec *spec) {
    if (spec->fd < 0 || (spec->direct && (!spec->offset_align || !spec->memory_align ||
                                          e->config.block_bytes % spec->offset_align ||
                                          e->config.bounce_block_bytes % spec->offset_align)))
        return -EINVAL;
    pthread_mutex_lock(&e->lock);
    int64_t number = add(e, spec);
    pthread_mutex_unlock(&e->lock);
    return number;
}

static int close_file(struct file *file) {
    int rc = close(file->spec.fd) ? -errno : 0;
    if (file->spec.buffered_fd >= 0 && close(file->spec.buffered_fd) && !rc)
        rc = -errno;
    free(file);
    return rc;
}

int lamina_file_remove(struct lamina_engine *e, int64_t number) {
    pthread_mutex_lock(&e->lock);
    struct file *file = file_find(e, number);
    if (!file) {
        pthread_mutex_unlock(&e->lock);
        return -EBADF;
    }
    file->closing = 1;
    e->references++;
    while (file->unfinished)
        pthread_cond_wait(&e->quiet, &e->lock);
    if (file->fixed_slot >= 0)
        e->driver->forget_file(e, file);
    e->files[number & SLOT_MASK] = NULL;
    pthread_mutex_unlock(&e->lock);
    int rc = close_file(file);
    pthread_mutex_lock(&e->lock);
    pthread_cond_broadcast(&e->quiet);
    engine_release(e);
    return rc;
}

void files_close_all(struct lamina_engine *e) {
    for (uint32_t i = 0; i < e->num_files; i++)
        if (e->files[i])
            close_file(e->files[i]);
    free(e->files);
    e->files = NULL;
    e->num_files = 0;
}
