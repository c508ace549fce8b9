# The broker's stamping of records, see `dmq.records.layout`.

cdef enum:
    STAMPED_BYTES = 55  # of a record, up to the last byte that is written
    QUEUE_AT = 18
    QUEUE_OFFSET_AT = 19
    ADDRESSES_AT = 27
    RECEIVE_TIME_AT = 47
    STORE_TIME_AT = 51


cdef inline uint32_t _relative(uint64_t at_ms, uint64_t sent_at_ms) noexcept:
    if at_ms <= sent_at_ms:
        return 0
    return 0xFFFF_FFFF if at_ms - sent_at_ms > 0xFFFF_FFFF else at_ms - sent_at_ms


def stamp_run(buffer, int64_t at, lengths, uint64_t journal_offset, stamp, int64_t table_at=-1):
    """Fill in the broker's fields of records that stand one after another.

    Parameters:
        buffer: where they stand.
        at: where the first begins.
        lengths: how long each is.
        journal_offset: where the first will stand in the journal.
        stamp: a `dmq.records.layout.Stamp`.
        table_at: where the lengths are to be written, before the records; -1 if nowhere.

    Returns the tag hashes, u16, and where each record will stand in the journal, u64, in native byte order.

    Raises:
        IndexError: a record reaches past the end of the buffer, or is too short to be one, or the lengths reach into them.
    """
    cdef uint8_t queue = stamp[0]
    cdef uint64_t queue_offset = stamp[1], received_at_ms = stamp[4], stored_at_ms = stamp[5], sent_at_ms
    cdef bytes client = stamp[2], server = stamp[3]
    cdef bint is_ipv6 = stamp[6]
    cdef Numbers sizes = Numbers(lengths)
    cdef bytearray tags = PyByteArray_FromStringAndSize(NULL, 2 * sizes.count)
    cdef bytearray offsets = PyByteArray_FromStringAndSize(NULL, 8 * sizes.count)
    cdef uint16_t *tag_at = <uint16_t *>PyByteArray_AS_STRING(tags)
    cdef uint64_t *offset_at = <uint64_t *>PyByteArray_AS_STRING(offsets)
    cdef uint8_t[12] addresses
    cdef uint8_t *record
    cdef Py_buffer data
    cdef Py_ssize_t index
    cdef int64_t size
    if PyBytes_GET_SIZE(client) != 6 or PyBytes_GET_SIZE(server) != 6:
        raise ValueError("an address has six bytes")
    if table_at >= 0 and (at < 0 or table_at > at or 4 * sizes.count > at - table_at):
        raise IndexError("the lengths reach into the records")
    memcpy(addresses, PyBytes_AS_STRING(client), 6)
    memcpy(addresses + 6, PyBytes_AS_STRING(server), 6)
    PyObject_GetBuffer(buffer, &data, PyBUF_WRITABLE)
    try:
        for index in range(sizes.count):
            size = sizes.get(index)
            if size < STAMPED_BYTES or at < 0 or size > data.len - at:
                raise IndexError("a record reaches past its buffer")
            record = <uint8_t *>data.buf + at
            tag_at[index] = dmq_get16(record + TAG_AT)
            offset_at[index] = journal_offset
            if table_at >= 0:
                dmq_put32(<uint8_t *>data.buf + table_at + 4 * index, size)
            sent_at_ms = dmq_get64(record + SEND_TIME_AT)
            dmq_put64(record + JOURNAL_OFFSET_AT, journal_offset)
            record[QUEUE_AT] = queue
            dmq_put64(record + QUEUE_OFFSET_AT, queue_offset)
            memcpy(record + ADDRESSES_AT, addresses, 12)
            dmq_put32(record + RECEIVE_TIME_AT, _relative(received_at_ms, sent_at_ms))
            dmq_put32(record + STORE_TIME_AT, _relative(stored_at_ms, sent_at_ms))
            if is_ipv6:
                record[FLAGS_AT] |= IPV6
            at += size
            journal_offset += size
            queue_offset += 1
    finally:
        PyBuffer_Release(&data)
    return tags, offsets
