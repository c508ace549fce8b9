# Bodies and keys of messages that were delivered, see `dmq.records.columns`.

cdef class _Opening:
    """What was taken out so far, and the block of the last body."""

    cdef list bodies, keys
    cdef object expand
    cdef bytes block
    cdef int64_t block_at
    cdef bint is_checked

    cdef const uint8_t *in_block(self, const uint8_t *pointer, int64_t start) except? NULL:
        """The body that the pointer of a record means; NULL if it is not there."""
        if self.expand is None:
            return NULL
        if start + dmq_get32(pointer) != self.block_at:
            self.block = self.expand(start + <int64_t>dmq_get32(pointer))
            self.block_at = start + dmq_get32(pointer)
        if self.block is None or dmq_get32(pointer + 4) + <int64_t>dmq_get32(pointer + 8) > PyBytes_GET_SIZE(self.block):
            return NULL
        return <const uint8_t *>PyBytes_AS_STRING(self.block) + dmq_get32(pointer + 4)

    cdef bint has_body(self, const uint8_t *data, int64_t start, int64_t end) except -1:
        """Whether a record has a body in itself or in a block, as it was sent."""
        cdef const uint8_t *at = data + start
        cdef int64_t body_size
        if end - start < RECORD_BYTES_MIN:
            return False
        body_size = dmq_get32(at + BODY_SIZE_AT)
        if at[FLAGS_AT] & COMPRESSED or body_size > end - start - BODY_AT:
            return False
        return not at[FLAGS_AT] & BLOCK or (body_size == POINTER_BYTES and self.in_block(at + BODY_AT, start) != NULL)

    cdef bint add(self, const uint8_t *data, int64_t start, int64_t end) except -1:
        """Take body and key of a record out; False if it is not certainly right."""
        cdef const uint8_t *at = data + start
        cdef const uint8_t *body = at + BODY_AT
        cdef const uint8_t *place
        cdef const uint8_t *key = NULL
        cdef int64_t body_size, left = end - start
        cdef int name, flags
        if left < RECORD_BYTES_MIN or dmq_get32(at) != left or dmq_get16(at + 4) != MAGIC:
            return False
        flags = at[FLAGS_AT]
        body_size = dmq_get32(at + BODY_SIZE_AT)
        left -= BODY_AT + body_size
        if flags & COMPRESSED or flags & ~(KNOWN_FLAGS | BLOCK) or left < 0:
            return False
        place = body + body_size
        for name in range(3):  # topic, app and business id
            if left < 1 or left < place[0] + 1:
                return False
            left -= place[0] + 1
            place += place[0] + 1
        if left < 2 or left - 2 != dmq_get16(place):
            return False
        left -= 2
        place += 2
        while left:
            if left < ENTRY_BYTES or left < ENTRY_BYTES + dmq_get16(place + 1):
                return False
            if place[0] == KEY:
                if key != NULL:
                    return False
                key = place
            left -= ENTRY_BYTES + dmq_get16(place + 1)
            place += ENTRY_BYTES + dmq_get16(place + 1)
        if flags & BLOCK:
            if body_size != POINTER_BYTES:
                return False
            body_size = dmq_get32(body + 8)
            body = self.in_block(body, start)
            if body == NULL:
                return False
        if self.is_checked and dmq_crc32c(body, body_size, 0) != dmq_get32(at + CRC_AT + 4):
            return False
        if key == NULL:
            self.keys.append(None)
        else:
            self.keys.append(PyUnicode_DecodeUTF8(<const char *>key + ENTRY_BYTES, dmq_get16(key + 1), NULL))
        self.bodies.append(PyBytes_FromStringAndSize(<const char *>body, body_size))
        return True


def open_records(bytes buffer not None, list starts not None, Py_ssize_t first, Py_ssize_t stop, expand, bint is_checked):
    """Bodies and keys of the records [first, stop); None if they are not all read alike."""
    cdef const uint8_t *data = <const uint8_t *>PyBytes_AS_STRING(buffer)
    cdef int64_t size = PyBytes_GET_SIZE(buffer), at, end
    cdef Py_ssize_t index
    cdef _Opening opening = _Opening()
    opening.bodies, opening.keys, opening.expand, opening.block_at = [], [], expand, -1
    opening.is_checked = is_checked
    if first < 0 or first >= stop or stop >= PyList_GET_SIZE(starts):
        return None
    try:
        at = starts[first]
        for index in range(first + 1, stop + 1):
            end = starts[index]
            if at < 0 or end < at or end > size or not opening.add(data, at, end):
                return None
            at = end
    except Exception:  # a block that cannot be expanded, a key that is not text: the plain code says so
        return None
    return opening.bodies, opening.keys


def have_bodies(bytes buffer not None, list starts not None, expand):
    """Whether each record has its body in itself, as it was sent, or in a block that can be expanded."""
    cdef const uint8_t *data = <const uint8_t *>PyBytes_AS_STRING(buffer)
    cdef int64_t size = PyBytes_GET_SIZE(buffer), at, end
    cdef Py_ssize_t index
    cdef _Opening opening = _Opening()
    opening.expand, opening.block_at = expand, -1
    if not PyList_GET_SIZE(starts):
        return False
    try:
        at = starts[0]
        for index in range(1, PyList_GET_SIZE(starts)):
            end = starts[index]
            if at < 0 or end < at or end > size or not opening.has_body(data, at, end):
                return False
            at = end
    except Exception:  # a block that cannot be expanded
        return False
    return True
