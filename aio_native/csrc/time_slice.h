/* How soon the scheduler runs a thread that has just become ready. */
#ifndef LAMINA_TIME_SLICE_H
#define LAMINA_TIME_SLICE_H

/* Asks for short time slices for the calling thread, which has little to do but must do it at once: among
 * many busy threads it then comes sooner (Linux 6.12 and later), while its share of the CPU stays as it was.
 * Does nothing where the kernel knows no such wish. */
void time_slice_shorten(void);

#endif
