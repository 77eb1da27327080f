/* CRC-32C (Castagnoli), the checksum of iSCSI and of ext4's metadata. */
#ifndef LAMINA_CRC32C_H
#define LAMINA_CRC32C_H
#include <stdint.h>

/* Continues from crc (0 to begin). The hardware's instruction where there is one. */
uint32_t lamina_crc32c(uint32_t crc, const void *data, uint64_t nbytes);

/* Continues from crc over `count` pieces that are not looked at, from the checksum of each: all of them piece
 * bytes long but the last, of last bytes. */
uint32_t lamina_crc32c_join(uint32_t crc, const uint32_t *crcs, uint64_t count, uint64_t piece,
                            uint64_t last);

/* Byte by byte from a table: the reference that the fast paths are tested against. */
uint32_t lamina_crc32c_plain(uint32_t crc, const void *data, uint64_t nbytes);

/* "sse4.2+pclmul", "sse4.2", "armv8-crc" or "table". */
const char *lamina_crc32c_path(void);

#endif
