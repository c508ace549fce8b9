# The unit of messages that came one by one, see `dmq.storage.journal.unit_writer`; `dmq.storage.journal.unit` draws it.

cdef enum:
    UNIT_HEADER_BYTES = 72
    UNIT_CRC_AT = 4
    UNIT_CRC_FROM = 8
    ROW_BYTES = 64
    KEYED_BYTES = 12  # the index and the hash of a key
    ADDRESS_BYTES = 16

UNIT_MAGIC_BYTES = b"DMQU"


def lone_bytes(list lones not None, list rows not None, head, uint16_t version):
    """Lay messages out as one unit, stamp its records, and checksum it.

    Parameters:
        lones: messages, each a `dmq.storage.journal.unit_writer.Lone`.
        rows: their rows in the batch table.
        head: a `dmq.storage.journal.unit_writer.UnitHead`.

    Returns the bytes, the fields of their header, their columns, and the tag hashes: see `dmq.storage.journal.unit`.
    """
    flags, epoch, start, stored, flushed, journal_id, server = head
    cdef uint64_t journal_offset = start, stored_at_ms = stored, sent_at_ms, received_at_ms, queue_offset, key_hash
    cdef Py_ssize_t count = PyList_GET_SIZE(lones), index, keyed = 0, size
    cdef int64_t total = UNIT_HEADER_BYTES + count * (4 + ROW_BYTES)
    cdef bytes data, address, client, here = server
    cdef list offsets = [], sizes = [], indexes = [], hashes = [], tags = []
    cdef tuple lone
    if PyList_GET_SIZE(rows) != count or PyBytes_GET_SIZE(here) != 6:
        raise ValueError("messages and rows do not belong together")
    for lone in lones:
        data = lone[2]
        size = PyBytes_GET_SIZE(data)
        if size < STAMPED_BYTES:
            raise ValueError("a record is too short to be one")
        sizes.append(size)
        total += size
        if lone[3]:
            indexes.append(len(sizes) - 1)
            hashes.append(lone[3])
    keyed = len(hashes)
    total += KEYED_BYTES * keyed
    if total > 0x7FFF_FFFF or PyList_GET_SIZE(lones) != count:
        raise ValueError("a unit is too large")
    cdef bytearray buffer = PyByteArray_FromStringAndSize(NULL, total)
    cdef uint8_t *unit = <uint8_t *>PyByteArray_AS_STRING(buffer)
    cdef uint8_t *length_at = unit + UNIT_HEADER_BYTES
    cdef uint8_t *row_at = length_at + 4 * count
    cdef uint8_t *index_at = row_at + ROW_BYTES * count
    cdef uint8_t *hash_at = index_at + 4 * keyed
    cdef uint8_t *record = hash_at + 8 * keyed
    memset(unit, 0, UNIT_HEADER_BYTES + count * (4 + ROW_BYTES))
    memcpy(unit, b"DMQU", 4)
    dmq_put16(unit + 8, version)
    dmq_put16(unit + 10, flags)
    dmq_put32(unit + 12, epoch)
    dmq_put64(unit + 16, journal_offset)
    dmq_put32(unit + 24, total)
    dmq_put32(unit + 28, count)
    dmq_put32(unit + 32, count)
    dmq_put32(unit + 36, keyed)
    dmq_put64(unit + 48, stored_at_ms)
    dmq_put64(unit + 56, flushed)
    dmq_put64(unit + 64, journal_id)
    for index in range(count):
        lone = lones[index]
        data = lone[2]
        if PyBytes_GET_SIZE(data) != sizes[index]:
            raise ValueError("a message changed")
        size = PyBytes_GET_SIZE(data)
        dmq_put32(length_at, size)
        length_at += 4
        producer_id, producer_epoch, sequence, records, topic_id, queue, row_flags, zero, first, where, port, blocks = (
            rows[index]
        )
        queue_offset, address = first, where
        if PyBytes_GET_SIZE(address) != ADDRESS_BYTES:
            raise ValueError("an address has 16 bytes")
        dmq_put64(row_at, producer_id)
        dmq_put32(row_at + 8, producer_epoch)
        dmq_put64(row_at + 12, sequence)
        dmq_put32(row_at + 20, records)
        dmq_put32(row_at + 24, topic_id)
        row_at[28] = queue
        row_at[29] = row_flags
        dmq_put16(row_at + 30, zero)
        dmq_put64(row_at + 32, queue_offset)
        memcpy(row_at + 40, PyBytes_AS_STRING(address), ADDRESS_BYTES)
        dmq_put16(row_at + 56, port)
        dmq_put32(row_at + 58, blocks)
        row_at += ROW_BYTES
        key_hash = lone[3]
        if key_hash:
            dmq_put32(index_at, index)
            index_at += 4
            dmq_put64(hash_at, key_hash)
            hash_at += 8
        memcpy(record, PyBytes_AS_STRING(data), size)
        received_at_ms = lone[7]
        _, _, where, is_ipv6 = lone[8]
        client = where
        if PyBytes_GET_SIZE(client) != 6:
            raise ValueError("an address has six bytes")
        sent_at_ms = dmq_get64(record + SEND_TIME_AT)
        dmq_put64(record + JOURNAL_OFFSET_AT, journal_offset + (record - unit))
        record[QUEUE_AT] = queue
        dmq_put64(record + QUEUE_OFFSET_AT, queue_offset)
        memcpy(record + ADDRESSES_AT, PyBytes_AS_STRING(client), 6)
        memcpy(record + ADDRESSES_AT + 6, PyBytes_AS_STRING(here), 6)
        dmq_put32(record + RECEIVE_TIME_AT, _relative(received_at_ms, sent_at_ms))
        dmq_put32(record + STORE_TIME_AT, _relative(stored_at_ms, sent_at_ms))
        if is_ipv6:
            record[FLAGS_AT] |= IPV6
        offsets.append(journal_offset + (record - unit))
        tags.append(dmq_get16(record + TAG_AT))
        record += size
    cdef uint32_t crc = dmq_crc32c(unit + UNIT_CRC_FROM, total - UNIT_CRC_FROM, 0)
    dmq_put32(unit + UNIT_CRC_AT, crc)
    fields = (
        UNIT_MAGIC_BYTES, crc, version, flags, epoch, start, total, count, count, keyed, 0, 0, stored, flushed, journal_id
    )
    return buffer, fields, (offsets, sizes, indexes, hashes, []), tags
