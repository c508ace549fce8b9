/* CRC-32C and CRC-32 of short byte strings. Long ones are left to the libraries: a call of them costs nothing then. */
#ifndef DMQ_CHECKSUM_H
#define DMQ_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint32_t dmq_castagnoli[8][256]; /* CRC-32C, where the processor has no instruction for it */
static uint32_t dmq_ieee[8][256];       /* CRC-32, as zlib has it */

static void dmq_fill(uint32_t table[8][256], uint32_t polynomial) {
    for (uint32_t value = 0; value < 256; value++) {
        uint32_t crc = value;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ polynomial : crc >> 1;
        table[0][value] = crc;
    }
    for (int row = 1; row < 8; row++)
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t crc = table[row - 1][value];
            table[row][value] = crc >> 8 ^ table[0][crc & 0xFF];
        }
}

/* Eight bytes a step, each through a table of its own. */
static uint32_t dmq_slice(uint32_t table[8][256], const uint8_t *at, size_t size, uint32_t crc) {
    crc = ~crc;
    for (; size >= 8; size -= 8, at += 8) {
        crc ^= (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
        crc = table[7][crc & 0xFF] ^ table[6][crc >> 8 & 0xFF] ^ table[5][crc >> 16 & 0xFF] ^ table[4][crc >> 24] ^
              table[3][at[4]] ^ table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
    }
    if (size >= 4) { /* keys are short: half of what one has is not left to the loop below */
        crc ^= (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
        crc = table[3][crc & 0xFF] ^ table[2][crc >> 8 & 0xFF] ^ table[1][crc >> 16 & 0xFF] ^ table[0][crc >> 24];
        size -= 4, at += 4;
    }
    for (; size; size--, at++) crc = crc >> 8 ^ table[0][(crc ^ *at) & 0xFF];
    return ~crc;
}

static uint32_t dmq_crc32c_plain(const uint8_t *at, size_t size, uint32_t crc) {
    return dmq_slice(dmq_castagnoli, at, size, crc);
}

static uint32_t (*dmq_crc32c)(const uint8_t *, size_t, uint32_t) = dmq_crc32c_plain;

/* The same of three byte strings of one size, side by side: the instruction begins every cycle, and takes three. */
static void dmq_crc32c_three_plain(const uint8_t *const at[3], size_t size, uint32_t crc[3]) {
    for (int way = 0; way < 3; way++) crc[way] = dmq_crc32c_plain(at[way], size, crc[way]);
}

static void (*dmq_crc32c_three)(const uint8_t *const at[3], size_t size, uint32_t crc[3]) = dmq_crc32c_three_plain;

static inline uint32_t dmq_crc32(const uint8_t *at, size_t size) { return dmq_slice(dmq_ieee, at, size, 0); }

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("sse4.2"))) static uint32_t dmq_crc32c_sse42(const uint8_t *at, size_t size, uint32_t crc) {
    uint64_t wide = (uint32_t)~crc;
    for (; size >= 8; size -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = (uint32_t)wide;
    if (size >= 4) {
        uint32_t half;
        memcpy(&half, at, 4);
        crc = __builtin_ia32_crc32si(crc, half);
        size -= 4, at += 4;
    }
    for (; size; size--, at++) crc = __builtin_ia32_crc32qi(crc, *at);
    return ~crc;
}

__attribute__((target("sse4.2"))) static void dmq_crc32c_three_sse42(
    const uint8_t *const at[3], size_t size, uint32_t crc[3]) {
    const uint8_t *first = at[0], *second = at[1], *third = at[2], *end = first + (size & ~(size_t)7);
    uint64_t one = (uint32_t)~crc[0], two = (uint32_t)~crc[1], three = (uint32_t)~crc[2], word;
    for (; first < end; first += 8, second += 8, third += 8) {
        memcpy(&word, first, 8);
        one = __builtin_ia32_crc32di(one, word);
        memcpy(&word, second, 8);
        two = __builtin_ia32_crc32di(two, word);
        memcpy(&word, third, 8);
        three = __builtin_ia32_crc32di(three, word);
    }
    crc[0] = dmq_crc32c_sse42(first, size & 7, ~(uint32_t)one);
    crc[1] = dmq_crc32c_sse42(second, size & 7, ~(uint32_t)two);
    crc[2] = dmq_crc32c_sse42(third, size & 7, ~(uint32_t)three);
}
#endif

/* Once, before anything else is called. */
static void dmq_checksum_begin(void) {
    dmq_fill(dmq_castagnoli, 0x82F63B78u);
    dmq_fill(dmq_ieee, 0xEDB88320u);
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2")) {
        dmq_crc32c = dmq_crc32c_sse42;
        dmq_crc32c_three = dmq_crc32c_three_sse42;
    }
#endif
}

static inline uint16_t dmq_get16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }

static inline uint32_t dmq_get32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    value = __builtin_bswap32(value);
#endif
    return value;
}

static inline uint64_t dmq_get64(const uint8_t *at) {
    return (uint64_t)dmq_get32(at) << 32 | dmq_get32(at + 4);
}

static inline void dmq_put16(uint8_t *at, uint16_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

static inline void dmq_put32(uint8_t *at, uint32_t value) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    value = __builtin_bswap32(value);
#endif
    memcpy(at, &value, 4);
}

static inline void dmq_put64(uint8_t *at, uint64_t value) {
    dmq_put32(at, (uint32_t)(value >> 32));
    dmq_put32(at + 4, (uint32_t)value);
}

/* Whether no byte is above 0x7F. */
static inline int dmq_is_ascii(const uint8_t *at, size_t size) {
    uint64_t seen = 0, word;
    for (; size >= 8; size -= 8, at += 8) {
        memcpy(&word, at, 8);
        seen |= word;
    }
    for (; size; size--, at++) seen |= *at;
    return !(seen & 0x8080808080808080ull);
}

#endif
