# The records of messages that differ in body and key only, see `dmq.records.encoder`.

cdef enum:
    HEAD_BYTES = 51        # bytes 4..54 of a record, which a template has
    FRONT_BYTES = 6        # bytes 4..9
    SENT_AT = 35           # the send time within a template's head
    KEY = 1
    ENTRY_BYTES = 3
    ATTRIBUTES_MAX = 32_768  # what has more is left to the plain code, which knows the limits


cdef extern from "Python.h":
    bint PyUnicode_CheckExact(object)
    bint PyUnicode_IS_COMPACT_ASCII(object)
    void *PyUnicode_DATA(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)
    const char *PyUnicode_AsUTF8AndSize(object, Py_ssize_t *size) except NULL


cdef struct Text:
    const uint8_t *at  # NULL where there is none
    Py_ssize_t size


cdef bint _read_run(list runs, Py_ssize_t number, Py_ssize_t *stop, int64_t *block) except -1:
    """Where a run of bodies ends, and where the block of them begins behind the records: -1 if they stand in those."""
    cdef tuple run
    if number >= PyList_GET_SIZE(runs):
        block[0] = -1
        return False
    run = runs[number]
    stop[0], block[0] = run[0], run[1]
    return True


cdef bint _read_key(object key, Text *text) noexcept:
    """A key as UTF-8; False if it is not text."""
    text.at = NULL
    text.size = 0
    if key is None:
        return True
    if not PyUnicode_CheckExact(key):
        return False
    if PyUnicode_IS_COMPACT_ASCII(key):  # as nearly all are: where its characters are, is its UTF-8
        text.at = <const uint8_t *>PyUnicode_DATA(key)
        text.size = PyUnicode_GET_LENGTH(key)
        return True
    try:
        text.at = <const uint8_t *>PyUnicode_AsUTF8AndSize(key, &text.size)
    except Exception:  # a lone surrogate
        return False
    return text.at != NULL


cdef void _body_crcs(list bodies, Py_ssize_t first, uint32_t *crcs) noexcept:
    """The checksums of three bodies, from one on, or of as many as there are; all of them are bytes."""
    cdef Place[3] at
    cdef Py_ssize_t[3] sizes
    cdef Py_ssize_t count = min(3, PyList_GET_SIZE(bodies) - first), way, common
    for way in range(count):
        at[way] = <const uint8_t *>PyBytes_AS_STRING(<object>PyList_GET_ITEM(bodies, first + way))
        sizes[way] = PyBytes_GET_SIZE(<object>PyList_GET_ITEM(bodies, first + way))
        crcs[way] = 0
    common = 0
    if count == 3:
        common = min(sizes[0], sizes[1], sizes[2])
        dmq_crc32c_three(at, common, crcs)
    for way in range(count):
        if sizes[way] > common:
            crcs[way] = dmq_crc32c(at[way] + common, sizes[way] - common, crcs[way])


def assemble_alike(list bodies not None, list keys not None, bytes head not None, bytes tail not None, list runs not None):
    """The records of messages that differ in body and key only; None if one of them is for the plain code.

    Parameters:
        head, tail: from the template of a message without a key.
        runs: of bodies that follow each other: one past the last, and where the block that they are in begins behind the
            records, -1 for those that are in none. Empty if no body is in one.

    Returns the records; their lengths (u32), which have a key (u32) and the keys' hashes (u64), in native byte order; and
    these columns once more as they stand in a request, see `dmq.protocol.batch`.
    """
    cdef Py_ssize_t count = PyList_GET_SIZE(bodies), index, keyed = 0, names_size = 0
    cdef Py_ssize_t tail_size = PyBytes_GET_SIZE(tail), attributes, entries, body_size, rest
    cdef const uint8_t *shared = <const uint8_t *>PyBytes_AS_STRING(tail)
    cdef const uint8_t *front = <const uint8_t *>PyBytes_AS_STRING(head)
    cdef uint64_t total = 0, key_hash
    cdef uint32_t seed, length
    cdef uint32_t[3] crcs
    cdef Text key
    cdef int part
    cdef Py_ssize_t run = 0, stop = 0
    cdef int64_t block = -1, last_block = -1, place = 0
    if PyList_GET_SIZE(keys) != count:
        return None
    if PyBytes_GET_SIZE(head) != HEAD_BYTES:
        return None
    for part in range(3):  # topic, app, business id
        if names_size >= tail_size:
            return None
        names_size += 1 + shared[names_size]
    entries = tail_size - names_size - 2
    if entries < 0 or entries != dmq_get16(shared + names_size):
        return None
    for index in range(count):
        body = <object>PyList_GET_ITEM(bodies, index)
        if not PyBytes_CheckExact(body) or not _read_key(<object>PyList_GET_ITEM(keys, index), &key):
            return None
        if key.at != NULL:
            keyed += 1
            if entries + ENTRY_BYTES + key.size > ATTRIBUTES_MAX:
                return None
            total += ENTRY_BYTES + key.size
        if PyBytes_GET_SIZE(body) > 0x7FFF_0000:
            return None
        while index >= stop and _read_run(runs, run, &stop, &block):
            run += 1
        total += BODY_AT + tail_size + (PyBytes_GET_SIZE(body) if block < 0 else POINTER_BYTES)
    cdef bytearray data = PyByteArray_FromStringAndSize(NULL, total)
    cdef bytearray lengths = PyByteArray_FromStringAndSize(NULL, 4 * count)
    cdef bytearray hash_index = PyByteArray_FromStringAndSize(NULL, 4 * keyed)
    cdef bytearray hashes = PyByteArray_FromStringAndSize(NULL, 8 * keyed)
    cdef bytes columns = PyBytes_FromStringAndSize(NULL, 4 * count + 12 * keyed)
    cdef uint8_t *sent_length_at = <uint8_t *>PyBytes_AS_STRING(columns)
    cdef uint8_t *sent_index_at = sent_length_at + 4 * count
    cdef uint8_t *sent_hash_at = sent_index_at + 4 * keyed
    cdef uint8_t *at = <uint8_t *>PyByteArray_AS_STRING(data)
    cdef uint32_t *length_at = <uint32_t *>PyByteArray_AS_STRING(lengths)
    cdef uint32_t *index_at = <uint32_t *>PyByteArray_AS_STRING(hash_index)
    cdef uint64_t *hash_at = <uint64_t *>PyByteArray_AS_STRING(hashes)
    cdef uint8_t *names_at
    cdef uint8_t *first = at
    run, stop, block = 0, 0, -1
    seed = dmq_crc32c(shared, names_size, dmq_crc32c(front + SENT_AT, 8, dmq_crc32c(front, FRONT_BYTES, 0)))
    for index in range(count):
        body = <object>PyList_GET_ITEM(bodies, index)
        _read_key(<object>PyList_GET_ITEM(keys, index), &key)
        body_size = PyBytes_GET_SIZE(body)
        if index % 3 == 0:
            _body_crcs(bodies, index, crcs)
        while index >= stop and _read_run(runs, run, &stop, &block):
            run += 1
        memcpy(at + 4, front, HEAD_BYTES)
        if block < 0:
            memcpy(at + BODY_AT, PyBytes_AS_STRING(body), body_size)
        else:
            if block != last_block:
                last_block, place = block, 0
            dmq_put32(at + BODY_AT, <int64_t>total - (at - first) + block)
            dmq_put32(at + BODY_AT + 4, place)
            dmq_put32(at + BODY_AT + 8, body_size)
            place += body_size
            body_size = POINTER_BYTES
            at[FLAGS_AT] |= BLOCK
        rest = tail_size
        attributes = entries
        if key.at != NULL:
            rest += ENTRY_BYTES + key.size
            attributes += ENTRY_BYTES + key.size
        length = BODY_AT + body_size + rest
        names_at = at + BODY_AT + body_size
        memcpy(names_at, shared, tail_size)
        names_at[names_size] = attributes >> 8
        names_at[names_size + 1] = attributes & 0xFF
        if key.at != NULL:
            names_at[tail_size] = KEY
            names_at[tail_size + 1] = key.size >> 8
            names_at[tail_size + 2] = key.size & 0xFF
            memcpy(names_at + tail_size + ENTRY_BYTES, key.at, key.size)
            key_hash = <uint64_t>dmq_crc32c(key.at, key.size, 0) << 32 | dmq_crc32(key.at, key.size)
            key_hash = key_hash if key_hash else 1
            index_at[0] = index
            index_at += 1
            dmq_put32(sent_index_at, index)
            sent_index_at += 4
            hash_at[0] = key_hash
            hash_at += 1
            dmq_put64(sent_hash_at, key_hash)
            sent_hash_at += 8
        dmq_put32(at, length)
        dmq_put32(at + CRC_AT, dmq_crc32c(names_at + names_size, rest - names_size, seed))
        dmq_put32(at + CRC_AT + 4, crcs[index % 3])
        dmq_put32(at + BODY_SIZE_AT, body_size)
        length_at[0] = length
        length_at += 1
        dmq_put32(sent_length_at, length)
        sent_length_at += 4
        at += length
    return data, lengths, hash_index, hashes, columns


def sizes_of(list bodies not None):
    """The sizes of the smallest and the largest of some bodies, and of all together; see `dmq.records.encoder`."""
    cdef Py_ssize_t smallest = 0, largest = 0, total = 0, size, index
    for index in range(PyList_GET_SIZE(bodies)):
        body = <object>PyList_GET_ITEM(bodies, index)
        size = PyBytes_GET_SIZE(body) if PyBytes_CheckExact(body) else len(body)
        if not index or size < smallest:
            smallest = size
        if size > largest:
            largest = size
        total += size
    return smallest, largest, total


def plain_crcs_of(list bodies not None):
    """CRC-32C as where the processor has no instruction for it, and CRC-32; for a test."""
    cdef list found = []
    cdef bytes body
    cdef Place[3] at
    cdef uint32_t[3] crcs
    cdef int way
    for body in bodies:
        for way in range(3):
            at[way], crcs[way] = <const uint8_t *>PyBytes_AS_STRING(body), 0
        dmq_crc32c_three_plain(at, PyBytes_GET_SIZE(body), crcs)
        found.append((crcs[0] if crcs[0] == crcs[1] == crcs[2] else 0, dmq_crc32(at[0], PyBytes_GET_SIZE(body))))
    return found


cdef uint64_t _put_record(uint8_t *at, bytes front, bytes tail, uint64_t sent_at_ms, bytes body, bytes key) noexcept:
    """Write one record, and return the hash of its key, 0 without one. There is room for all of it."""
    cdef Py_ssize_t body_size = PyBytes_GET_SIZE(body), tail_size = PyBytes_GET_SIZE(tail)
    cdef Py_ssize_t key_size = 0 if key is None else PyBytes_GET_SIZE(key)
    cdef uint8_t *names = at + BODY_AT + body_size
    cdef uint64_t key_hash = 0
    memset(at, 0, BODY_AT)
    memcpy(at + 4, PyBytes_AS_STRING(front), FRONT_BYTES)
    memcpy(at + BODY_AT, PyBytes_AS_STRING(body), body_size)
    memcpy(names, PyBytes_AS_STRING(tail), tail_size)
    if key is not None:
        memcpy(names + tail_size, PyBytes_AS_STRING(key), key_size)
        key_hash = <uint64_t>dmq_crc32c(names + tail_size, key_size, 0) << 32 | dmq_crc32(names + tail_size, key_size)
        key_hash = key_hash if key_hash else 1
    dmq_put32(at, BODY_AT + body_size + tail_size + key_size)
    dmq_put64(at + SEND_TIME_AT, sent_at_ms)
    cdef uint32_t crc = dmq_crc32c(at + SEND_TIME_AT, 8, dmq_crc32c(at + 4, FRONT_BYTES, 0))
    dmq_put32(at + CRC_AT, dmq_crc32c(names, tail_size + key_size, crc))
    dmq_put32(at + CRC_AT + 4, dmq_crc32c(at + BODY_AT, body_size, 0))
    dmq_put32(at + BODY_SIZE_AT, body_size)
    return key_hash


cdef Py_ssize_t _record_size(bytes front, bytes tail, bytes body, bytes key) except -1:
    cdef Py_ssize_t size = BODY_AT + PyBytes_GET_SIZE(body) + PyBytes_GET_SIZE(tail)
    if key is not None:
        size += PyBytes_GET_SIZE(key)
    if PyBytes_GET_SIZE(front) != FRONT_BYTES or size > 0x7FFF_0000:
        raise ValueError("these are not parts of a record")
    return size


def lone_record(bytes front not None, bytes tail not None, uint64_t sent_at_ms, bytes body not None, bytes key):
    """One record in one piece, and the hash of its key, 0 without one.

    Parameters:
        front: bytes 4 to 9 of it.
        tail: everything between the body and the key.
        key: as UTF-8.
    """
    cdef bytes record = PyBytes_FromStringAndSize(NULL, _record_size(front, tail, body, key))
    return record, _put_record(<uint8_t *>PyBytes_AS_STRING(record), front, tail, sent_at_ms, body, key)
