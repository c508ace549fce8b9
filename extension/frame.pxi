# The frames of a message that is sent by itself, see `dmq.client.producer.straight_path`, `dmq.protocol.frame` and
# `dmq.broker.publish.straight_path`.

cdef enum:
    FRAME_HEAD_BYTES = 20
    FRAME_CRC_BYTES = 4
    WIRE = 0xD1
    REQUEST = 1
    RESPONSE = 2
    PRODUCE = 0x10
    PRODUCE_BYTES = 24  # of the header behind the topic, as a lone message has it
    PRODUCE_FIELDS = 8
    ANSWER_BYTES = 23   # of the header of its answer
    LEVEL_MAX = 3       # REPLICATED


cdef void _put_head(uint8_t *at, uint32_t size, int kind, uint32_t correlation, uint32_t header_bytes) noexcept:
    dmq_put32(at, size - 4)
    at[4] = WIRE
    at[5] = kind
    dmq_put16(at + 6, PRODUCE)
    dmq_put32(at + 8, 0)  # status and flags
    dmq_put32(at + 12, correlation)
    dmq_put32(at + 16, header_bytes)


def lone_frame(bytes front not None, shape, bytes body not None, bytes key, numbers):
    """The frame of a PRODUCE of one message.

    Parameters:
        front: its header up to the topic.
        shape: a `dmq.records.encoder.Shape`.
        numbers: correlation, queue, producer id, sequence, durability, and the time of sending.
    """
    cdef bytes record_front = shape[0], tail = shape[2]
    correlation, queue, producer_id, sequence, level, sent_at_ms = numbers
    cdef Py_ssize_t record_size = _record_size(record_front, tail, body, key), front_size = PyBytes_GET_SIZE(front)
    cdef Py_ssize_t columns = 4 if key is None else 16
    cdef Py_ssize_t size = FRAME_HEAD_BYTES + front_size + PRODUCE_BYTES + columns + record_size + FRAME_CRC_BYTES
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, size)
    cdef uint8_t *start = <uint8_t *>PyBytes_AS_STRING(frame)
    cdef uint8_t *at = start + FRAME_HEAD_BYTES + front_size
    cdef uint64_t key_hash
    _put_head(start, size, REQUEST, correlation, front_size + PRODUCE_BYTES)
    memcpy(start + FRAME_HEAD_BYTES, PyBytes_AS_STRING(front), front_size)
    at[0] = 0xCC
    at[1] = queue
    at[2] = 1
    at[3] = 0 if key is None else 1
    at[4] = 0xCF
    dmq_put64(at + 5, producer_id)
    at[13] = 0
    at[14] = 0xCF
    dmq_put64(at + 15, sequence)
    at[23] = level
    at += PRODUCE_BYTES
    key_hash = _put_record(at + columns, record_front, tail, sent_at_ms, body, key)
    dmq_put32(at, record_size)
    if key is not None:
        dmq_put32(at + 4, 0)
        dmq_put64(at + 8, key_hash)
    dmq_put32(start + size - FRAME_CRC_BYTES, dmq_crc32c(start, size - FRAME_CRC_BYTES, 0))
    return frame


cdef bint _is_frame(const uint8_t *at, Py_ssize_t size, int kind) noexcept:
    """Whether these bytes are one frame of a kind without flags, and its checksum is right."""
    return (
        size >= FRAME_HEAD_BYTES + FRAME_CRC_BYTES
        and dmq_get32(at) == <uint64_t>size - 4
        and at[4] == WIRE
        and at[5] == kind
        and dmq_get16(at + 10) == 0
        and dmq_get32(at + 16) <= <uint64_t>size - FRAME_HEAD_BYTES - FRAME_CRC_BYTES
        and dmq_get32(at + size - FRAME_CRC_BYTES) == dmq_crc32c(at, size - FRAME_CRC_BYTES, 0)
    )


def lone_answer(bytes data not None, uint32_t correlation):
    """Queue, offset and durability from the answer to a message that went well; None if these bytes may be another."""
    cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(data)
    cdef const uint8_t *header = at + FRAME_HEAD_BYTES
    if PyBytes_GET_SIZE(data) != FRAME_HEAD_BYTES + ANSWER_BYTES + FRAME_CRC_BYTES:
        return None
    if dmq_get16(at + 6) != PRODUCE or dmq_get16(at + 8) != 0 or dmq_get32(at + 12) != correlation:
        return None
    if not _is_frame(at, PyBytes_GET_SIZE(data), RESPONSE) or dmq_get32(at + 16) != ANSWER_BYTES:
        return None
    if header[0] != 0x95 or header[1] != 0xCC or header[3] != 0xCF or header[12] != 0xCF or header[21] > LEVEL_MAX:
        return None
    if (header[22] != 0xC2 and header[22] != 0xC3) or (header[4] | header[13]) & 0x80:  # no offset is so large
        return None
    return header[2], dmq_get64(header + 4), header[21]


def sealed_produce_answer(
    uint32_t correlation, uint8_t queue, uint64_t first_offset, uint64_t journal_offset, uint8_t durability
):
    """The answer to a message that is new, with the frame's checksum; see `dmq.protocol.commands`."""
    cdef Py_ssize_t size = FRAME_HEAD_BYTES + ANSWER_BYTES + FRAME_CRC_BYTES
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, size)
    cdef uint8_t *start = <uint8_t *>PyBytes_AS_STRING(frame)
    cdef uint8_t *header = start + FRAME_HEAD_BYTES
    _put_head(start, size, RESPONSE, correlation, ANSWER_BYTES)
    header[0], header[1], header[2], header[3], header[12] = 0x95, 0xCC, queue, 0xCF, 0xCF
    dmq_put64(header + 4, first_offset)
    dmq_put64(header + 13, journal_offset)
    header[21], header[22] = durability, 0xC2
    dmq_put32(start + size - FRAME_CRC_BYTES, dmq_crc32c(start, size - FRAME_CRC_BYTES, 0))
    return frame


def whole_request(buffer, Py_ssize_t size):
    """The bytes of a small request, its command, its correlation, and where its body begins.

    None if what stands at the front of the buffer is not one frame with a right checksum and without flags.
    """
    cdef Py_buffer data
    cdef const uint8_t *at
    PyObject_GetBuffer(buffer, &data, PyBUF_SIMPLE)
    try:
        at = <const uint8_t *>data.buf
        if size > data.len or not _is_frame(at, size, REQUEST):
            return None
        return (
            PyBytes_FromStringAndSize(<const char *>at, size), dmq_get16(at + 6), dmq_get32(at + 12),
            FRAME_HEAD_BYTES + dmq_get32(at + 16),
        )
    finally:
        PyBuffer_Release(&data)


cdef const uint8_t *_read_number(const uint8_t *at, const uint8_t *end, uint64_t *number) noexcept:
    """Read a number, and return where it ends; NULL if there is none, as if one was read before and was none."""
    cdef int kind, size, index
    if at == NULL or at >= end:
        return NULL
    kind = at[0]
    at += 1
    if kind < 0x80:
        number[0] = kind
        return at
    if kind < 0xCC or kind > 0xCF or end - at < 1 << (kind - 0xCC):
        return NULL
    size = 1 << (kind - 0xCC)
    number[0] = 0
    for index in range(size):
        number[0] = number[0] << 8 | at[index]
    return at + size


def lone_request(bytes whole not None, Py_ssize_t body_at):
    """The fields of a PRODUCE of one message, its record and the hash of its key; None if it may be anything else.

    Parameters:
        whole: a request with its checksum, which is right.
        body_at: where its body begins.
    """
    cdef const uint8_t *start = <const uint8_t *>PyBytes_AS_STRING(whole)
    cdef const uint8_t *at = start + FRAME_HEAD_BYTES
    cdef const uint8_t *end = start + PyBytes_GET_SIZE(whole) - FRAME_CRC_BYTES
    cdef const uint8_t *body = start + body_at
    cdef uint64_t[7] fields
    cdef uint64_t key_hash = 0
    cdef Py_ssize_t name_size
    cdef int field
    if body_at < FRAME_HEAD_BYTES + 2 or body > end or at[0] != (0x90 | PRODUCE_FIELDS):
        return None
    name_size = at[1] & 0x1F if at[1] >> 5 == 5 else 0
    at += 2
    if at[-1] == 0xD9 and at < body:
        name_size = at[0]
        at += 1
    if not name_size or body - at < name_size or not dmq_is_ascii(at, name_size):
        return None
    topic = PyUnicode_DecodeUTF8(<const char *>at, name_size, NULL)
    at += name_size
    for field in range(7):  # queue, count, keys, producer id, epoch, first sequence, durability
        at = _read_number(at, body, &fields[field])
        if at == NULL:
            return None
    if at != body or fields[0] > 0xFF or fields[1] != 1 or fields[2] > 1 or fields[4] > 0xFFFF_FFFF:
        return None
    if fields[6] > LEVEL_MAX or end - body < (16 if fields[2] else 4):
        return None
    at = body + 4
    if fields[2]:
        key_hash = dmq_get64(body + 8)
        if dmq_get32(body + 4) or not key_hash:
            return None
        at = body + 16
    if end - at < RECORD_BYTES_MIN or dmq_get32(body) != <uint64_t>(end - at):
        return None
    return (
        (topic, fields[0], 1, fields[2], fields[3], fields[4], fields[5], fields[6]),
        PyBytes_FromStringAndSize(<const char *>at, end - at), key_hash,
    )
