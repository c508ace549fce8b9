# The check of a batch, see `dmq.records.check`. `dmq.records.layout` draws a record, `dmq.records.attributes` its attributes.

cdef enum:
    MAGIC = 0xD301
    FLAGS_AT = 6
    TAG_AT = 7
    PRIORITY_AT = 9
    JOURNAL_OFFSET_AT = 10
    SEND_TIME_AT = 39
    CRC_AT = 55
    BODY_SIZE_AT = 63
    BODY_AT = 67
    RECORD_BYTES_MIN = 72
    COMPRESSED = 0x01
    IPV6 = 0x10
    KNOWN_FLAGS = 0x7F
    BLOCK = 0x40           # the body stands in a block, and a pointer in its place
    POINTER_BYTES = 12     # distance, place, size
    PRIORITY_MAX = 9
    COMPRESSION = 13
    PROPERTY = 0x80
    PROPERTIES_MAX = 16  # of one record that are compared with each other here
    TEXT = -1
    ANYTHING = -2

ctypedef const uint8_t *Place

# How many bytes the value of a kind takes, or TEXT, or ANYTHING.
cdef int[PROPERTY] SHAPES


cdef void _fill_shapes() noexcept:
    cdef int kind
    for kind in range(PROPERTY):
        SHAPES[kind] = ANYTHING
    for kind in (1, 2, 5, 9, 12, 14, 18, 20):
        SHAPES[kind] = TEXT
    for kind in (3, 7, 8, 15, 16, 21, 22):
        SHAPES[kind] = 8
    for kind in (6, 10, 17):
        SHAPES[kind] = 1
    for kind in (11, 19):
        SHAPES[kind] = 4
    SHAPES[4] = 16
    SHAPES[COMPRESSION] = 5


_fill_shapes()


cdef struct Rules:
    const uint8_t *named
    Py_ssize_t named_size
    int64_t body_bytes_max
    int64_t attributes_bytes_max
    int flags_forbidden
    bint check_crc


cdef bint _is_text(const uint8_t *at, Py_ssize_t size) noexcept:
    """Whether these bytes are UTF-8."""
    if dmq_is_ascii(at, size):
        return True
    try:
        PyUnicode_DecodeUTF8(<const char *>at, size, NULL)
    except Exception:
        return False
    return True


cdef bint _are_attributes(const uint8_t *at, const uint8_t *end, bint is_compressed) noexcept:
    """Whether attributes are right between these places."""
    cdef uint64_t low = 0, high = 0, bit
    cdef int kind, shape, properties = 0, other
    cdef Py_ssize_t size, key_size
    cdef Place[PROPERTIES_MAX] keys
    while at < end:
        if end - at < 3:
            return False
        kind = at[0]
        size = dmq_get16(at + 1)
        at += 3
        if size > end - at:
            return False
        if kind < PROPERTY:
            bit = <uint64_t>1 << (kind & 63)
            if kind < 64:
                if low & bit:
                    return False
                low |= bit
            else:
                if high & bit:
                    return False
                high |= bit
            shape = SHAPES[kind]
            if shape == TEXT:
                if not _is_text(at, size):
                    return False
            elif shape != ANYTHING and shape != size:
                return False
        elif kind == PROPERTY:
            if size < 2 or properties == PROPERTIES_MAX:
                return False
            key_size = at[0]
            if key_size < 1 or key_size >= size:
                return False
            if not _is_text(at + 1, key_size) or not _is_text(at + 1 + key_size, size - 1 - key_size):
                return False
            for other in range(properties):
                if memcmp(keys[other], at, key_size + 1) == 0:
                    return False
            keys[properties] = at
            properties += 1
        at += size
    return not is_compressed or (low >> COMPRESSION) & 1


cdef bint _is_right(const uint8_t *at, int64_t size, const Rules *rules) noexcept:
    """Whether a record of so many bytes, no fewer than the smallest has, is right."""
    cdef int64_t body_size, left
    cdef const uint8_t *end = at + size
    cdef const uint8_t *names
    cdef const uint8_t *place
    cdef int flags = at[FLAGS_AT]
    cdef Py_ssize_t name_size
    cdef uint32_t crc
    cdef uint8_t[6] front
    if dmq_get32(at) != size or dmq_get16(at + 4) != MAGIC or at[PRIORITY_AT] > PRIORITY_MAX:
        return False
    if flags & rules.flags_forbidden or flags & ~KNOWN_FLAGS:
        return False
    body_size = dmq_get32(at + BODY_SIZE_AT)
    if body_size > rules.body_bytes_max:
        return False
    if flags & BLOCK and (flags & COMPRESSED or body_size != POINTER_BYTES):
        return False
    # What is left behind the body must hold the topic, the sizes of app and business id, and that of the attributes.
    left = size - BODY_AT - body_size
    if left < rules.named_size + 4:
        return False
    names = place = at + BODY_AT + body_size
    if memcmp(place, rules.named, rules.named_size) != 0:
        return False
    place += rules.named_size
    left -= rules.named_size
    name_size = place[0]
    if left < name_size + 4 or not _is_text(place + 1, name_size):
        return False
    place += name_size + 1
    left -= name_size + 1
    name_size = place[0]
    if left < name_size + 3 or not _is_text(place + 1, name_size):
        return False
    place += name_size + 1
    left -= name_size + 3
    if left != dmq_get16(place) or left > rules.attributes_bytes_max:
        return False
    if not _are_attributes(place + 2, end, flags & COMPRESSED):
        return False
    if rules.check_crc:
        # That of a body in a block is looked at with the block.
        if not flags & BLOCK and dmq_crc32c(at + BODY_AT, body_size, 0) != dmq_get32(at + CRC_AT + 4):
            return False
        memcpy(front, at + 4, 6)
        front[FLAGS_AT - 4] &= 0xFF & ~(IPV6 | BLOCK)
        crc = dmq_crc32c(at + SEND_TIME_AT, 8, dmq_crc32c(front, 6, 0))
        if dmq_crc32c(names, end - names, crc) != dmq_get32(at + CRC_AT):
            return False
    return True


def are_right(buffer, lengths, rules, int64_t raw_size=0):
    """Whether all records of a batch are certainly right; see `dmq.records.check.are_right_plain`.

    Parameters:
        raw_size: of the block that follows the buffer, which the bodies that stand in it fill one after another; 0 if
            pointers to blocks are looked at elsewhere.
    """
    cdef Rules asked
    cdef Py_buffer data
    cdef int64_t at = 0, filled = 0, size
    cdef const uint8_t *record
    cdef Py_ssize_t index
    cdef Numbers sizes = Numbers(lengths)
    cdef bytes named = rules.named
    asked.named = <const uint8_t *>PyBytes_AS_STRING(named)
    asked.named_size = PyBytes_GET_SIZE(named)
    asked.body_bytes_max = rules.body_bytes_max
    asked.attributes_bytes_max = rules.attributes_bytes_max
    asked.flags_forbidden = rules.flags_forbidden
    asked.check_crc = rules.check_crc
    if asked.named_size == 0:
        return False
    PyObject_GetBuffer(buffer, &data, PyBUF_SIMPLE)
    try:
        for index in range(sizes.count):
            size = sizes.get(index)
            if size < RECORD_BYTES_MIN or size > data.len - at:
                return False
            record = <const uint8_t *>data.buf + at
            if not _is_right(record, size, &asked):
                return False
            if raw_size and record[FLAGS_AT] & BLOCK:
                if at + dmq_get32(record + BODY_AT) != data.len or dmq_get32(record + BODY_AT + 4) != filled:
                    return False
                if dmq_get32(record + BODY_AT + 8) > asked.body_bytes_max:
                    return False
                filled += dmq_get32(record + BODY_AT + 8)
            at += size
        return at == data.len and filled == raw_size
    except OverflowError:
        return False
    finally:
        PyBuffer_Release(&data)


def shape_of(int kind):
    """What the check knows of a kind of attribute below `PROPERTY`, for a test."""
    return SHAPES[kind]
