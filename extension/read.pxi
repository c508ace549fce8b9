# Bodies and keys of records that were handed out, see `dmq.records.check` and `dmq.records.columns`.

cdef enum:
    BLOCK = 0x40           # the body stands in a block, and a pointer in its place
    POINTER_BYTES = 12     # distance, place, size


def checked_bodies(bytes buffer not None, bounds, expand):
    """The bodies of some records, as they are stored or out of their blocks; None if one is not certainly right.

    Parameters:
        buffer: the records, and the blocks behind them.
        bounds: where each record begins, and where the last one ends.
        expand: gives the bytes of the block that begins at a place; None where no body stands in one.
    """
    cdef Numbers edges = Numbers(bounds)
    cdef const uint8_t *octets = <const uint8_t *>PyBytes_AS_STRING(buffer)
    cdef int64_t start, end = 0, size, place, block_at = -1, found_at, total = PyBytes_GET_SIZE(buffer)
    cdef Py_ssize_t index
    cdef const uint8_t *record
    cdef const uint8_t *body
    cdef bytes block = b""
    cdef list found = []
    try:
        for index in range(edges.count - 1):
            start, end = edges.get(index), edges.get(index + 1)
            if start < 0 or end > total or end - start < RECORD_BYTES_MIN:
                return None
            record = octets + start
            size = dmq_get32(record + BODY_SIZE_AT)
            if size > end - start - BODY_AT:
                return None
            body = record + BODY_AT
            if record[FLAGS_AT] & BLOCK:
                if expand is None or size != POINTER_BYTES:
                    return None
                found_at = start + dmq_get32(body)
                place = dmq_get32(body + 4)
                size = dmq_get32(body + 8)
                if found_at != block_at:
                    block = expand(found_at)
                    block_at = found_at
                if block is None or place + size > PyBytes_GET_SIZE(block):
                    return None
                body = <const uint8_t *>PyBytes_AS_STRING(block) + place
            if dmq_crc32c(body, size, 0) != dmq_get32(record + CRC_AT + 4):
                return None
            found.append(PyBytes_FromStringAndSize(<const char *>body, size))
    except Exception:  # a block that cannot be expanded, a bound that is no place: the plain code says so
        return None
    return found


def spans_of(buffer, bounds, int packed):
    """Where bodies end, keys begin and keys end; None if a record is none.

    Parameters:
        packed: the flags of a body that does not stand in its record as it was sent.
    """
    cdef Numbers edges = Numbers(bounds)
    cdef int64_t start, end, at, size
    cdef Py_ssize_t index
    cdef const uint8_t *octets
    cdef Py_buffer data
    cdef int part
    cdef list body_ends = [], key_starts = [], key_ends = []
    PyObject_GetBuffer(buffer, &data, PyBUF_SIMPLE)
    octets = <const uint8_t *>data.buf
    try:
        for index in range(edges.count - 1):
            start, end = edges.get(index), edges.get(index + 1)
            if start < 0 or end > data.len or end - start < RECORD_BYTES_MIN:
                return None
            at = start + BODY_AT + dmq_get32(octets + start + BODY_SIZE_AT)
            if dmq_get32(octets + start) != end - start or at > end - 5:
                return None
            if dmq_get16(octets + start + 4) != MAGIC or octets[start + FLAGS_AT] & packed:
                body_ends.append(0)
            else:
                body_ends.append(at)
            for part in range(3):  # topic, app, business id
                at += 1 + octets[at]
                if at > end - 2:
                    return None
            size = dmq_get16(octets + at)
            at += 2
            if at + size != end:
                return None
            if size < ENTRY_BYTES:
                key_starts.append(-1)
                key_ends.append(0)
                continue
            key_starts.append(at + ENTRY_BYTES)
            size = at + ENTRY_BYTES + dmq_get16(octets + at + 1)
            key_ends.append(size if octets[at] == KEY and size <= end else 0)
    except OverflowError:
        return None
    finally:
        PyBuffer_Release(&data)
    return body_ends, key_starts, key_ends
