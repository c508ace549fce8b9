# What is pushed to a consumer: its frame, see `dmq.broker.wire.session`; frames that came together, see
# `dmq.protocol.frame`; the messages in it, see `dmq.client.consumer.delivery`.

cdef enum:
    ONE_WAY = 3
    CONSUMER_PUSH = 0x23
    NUMBER_BYTES_MAX = 9
    PUSH_NUMBERS = 9
    RUN_NUMBERS = 3
    # Of its header: the numbers, and what stands around them.
    PUSH_HEADER_BYTES_MAX = (PUSH_NUMBERS + RUN_NUMBERS + 1) * NUMBER_BYTES_MAX + 6
    PUSH_RECORDS_MAX = 4096


cdef uint8_t *_put_number(uint8_t *at, uint64_t number) noexcept:
    """Write a number as MessagePack has it, in as few bytes as it takes, and return where it ends."""
    cdef int size = 0
    if number < 0x80:
        at[0] = number
        return at + 1
    while number >> (8 << size) and size < 3:
        size += 1
    at[0] = 0xCC + size
    for index in range(1 << size):
        at[1 + index] = number >> 8 * ((1 << size) - 1 - index) & 0xFF
    return at + 1 + (1 << size)


def sealed_push(tuple numbers not None, tuple run not None, list lengths not None, piece):
    """The whole frame that pushes one lease, with its checksum; see `dmq.broker.wire.session`.

    Parameters:
        numbers: subscription, queue, epoch, number of the lease, its first and its end offset, attempt, time, and seek.
        run: how many messages, of which producer, from which sequence on.
        lengths: of the records.
        piece: the records.
    """
    cdef uint64_t[PUSH_NUMBERS] values
    cdef uint64_t[RUN_NUMBERS] ids
    cdef uint8_t[PUSH_HEADER_BYTES_MAX] header
    cdef uint8_t *end = header
    cdef uint8_t *at
    cdef Py_ssize_t index, count = PyList_GET_SIZE(lengths), header_size, size
    cdef Py_buffer data
    cdef bytes frame
    if PyTuple_GET_SIZE(numbers) != PUSH_NUMBERS or PyTuple_GET_SIZE(run) != RUN_NUMBERS:
        raise ValueError("a lease has nine numbers, and three of them its ids")
    for index in range(PUSH_NUMBERS):
        values[index] = numbers[index]
    for index in range(RUN_NUMBERS):
        ids[index] = run[index]
    end[0] = 0x92
    end = _put_number(end + 1, values[0])
    end[0], end[1] = 0x91, 0x9B
    end += 2
    for index in range(1, 6):  # queue, epoch, number, first and end offset
        end = _put_number(end, values[index])
    end = _put_number(end, count)
    end = _put_number(end, values[6])
    end = _put_number(end, values[7])
    end[0], end[1], end[2] = 0xA0, 0x91, 0x93  # the topic that was asked for; one run of ids
    end += 3
    for index in range(RUN_NUMBERS):
        end = _put_number(end, ids[index])
    end = _put_number(end, values[8])
    header_size = end - header
    PyObject_GetBuffer(piece, &data, PyBUF_SIMPLE)
    try:
        if count > PUSH_RECORDS_MAX or data.len > 0x7FFF_FFFF - (64 << 10):
            raise ValueError("a push of this size is sent in pieces")
        size = FRAME_HEAD_BYTES + header_size + 4 * count + data.len + FRAME_CRC_BYTES
        frame = PyBytes_FromStringAndSize(NULL, size)
        at = <uint8_t *>PyBytes_AS_STRING(frame)
        _put_head(at, size, ONE_WAY, 0, header_size)
        dmq_put16(at + 6, CONSUMER_PUSH)
        at += FRAME_HEAD_BYTES
        memcpy(at, header, header_size)
        at += header_size
        for index in range(count):
            dmq_put32(at, lengths[index])
            at += 4
        memcpy(at, data.buf, data.len)
        at = <uint8_t *>PyBytes_AS_STRING(frame)
        dmq_put32(at + size - FRAME_CRC_BYTES, dmq_crc32c(at, size - FRAME_CRC_BYTES, 0))
        return frame
    finally:
        PyBuffer_Release(&data)


def split_frames(buffer, Py_ssize_t size, make):
    """The frames at the front of a buffer, if they are whole, fill it, and have right checksums; else None.

    Parameters:
        make: makes a frame of its kind, command, status, flags, correlation, header and body.
    """
    cdef Py_buffer data
    cdef const uint8_t *at
    cdef const uint8_t *end
    cdef int64_t length, header_size
    cdef list frames = []
    PyObject_GetBuffer(buffer, &data, PyBUF_SIMPLE)
    try:
        if not 0 < size <= data.len:
            return None
        at = <const uint8_t *>data.buf
        end = at + size
        while at < end:
            if end - at < FRAME_HEAD_BYTES + FRAME_CRC_BYTES:
                return None
            length = <int64_t>dmq_get32(at) + 4 - FRAME_CRC_BYTES
            header_size = dmq_get32(at + 16)
            if length > end - at - FRAME_CRC_BYTES or header_size > length - FRAME_HEAD_BYTES:
                return None
            if at[4] != WIRE or not REQUEST <= at[5] <= ONE_WAY:
                return None
            if dmq_get32(at + length) != dmq_crc32c(at, length, 0):
                return None
            frames.append(make(
                at[5], dmq_get16(at + 6), dmq_get16(at + 8), dmq_get16(at + 10), dmq_get32(at + 12),
                PyBytes_FromStringAndSize(<const char *>at + FRAME_HEAD_BYTES, header_size),
                PyBytes_FromStringAndSize(
                    <const char *>at + FRAME_HEAD_BYTES + header_size, length - FRAME_HEAD_BYTES - header_size
                ),
            ))
            at += length + FRAME_CRC_BYTES
        return frames
    finally:
        PyBuffer_Release(&data)


def open_push(bytes body not None, Py_ssize_t count):
    """The records of a lease, where each begins and the last one ends, and their bodies and keys.

    None if the records do not fill the body, or any is not certainly right and as it was sent, checksum and all.
    """
    cdef const uint8_t *columns = <const uint8_t *>PyBytes_AS_STRING(body)
    cdef const uint8_t *data = columns + 4 * count
    cdef int64_t size = PyBytes_GET_SIZE(body) - 4 * count, at = 0, end
    cdef Py_ssize_t index
    cdef list starts = [0]
    cdef _Opening opening = _Opening()
    if count <= 0 or count > PUSH_RECORDS_MAX or size < 0:
        return None
    opening.bodies, opening.keys, opening.expand, opening.block_at = [], [], None, -1
    opening.is_checked = True
    try:
        for index in range(count):
            end = at + dmq_get32(columns + 4 * index)
            if end > size or not opening.add(data, at, end):
                return None
            starts.append(end)
            at = end
    except UnicodeDecodeError:  # a key that is not text: the plain code says so
        return None
    if at != size:
        return None
    return PyBytes_FromStringAndSize(<const char *>data, size), starts, opening.bodies, opening.keys
