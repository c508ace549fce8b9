# Columns of numbers: of few records a tuple or list, of many an array of numpy.

def divide_columns(body, Py_ssize_t count, Py_ssize_t keys):
    """The columns before the records of a batch, see `dmq.protocol.batch`: lengths (u32), which have a key (u32), and the
    keys' hashes (u64), in native byte order; and what the lengths add up to. None if the keys are not right."""
    cdef Py_buffer data
    cdef Py_ssize_t index
    cdef uint64_t total = 0
    cdef int64_t last = -1
    cdef bytearray lengths, hash_index, hashes
    cdef const uint8_t *at
    PyObject_GetBuffer(body, &data, PyBUF_SIMPLE)
    try:
        if keys < 0 or keys > count or count > data.len or 4 * count + 12 * keys > data.len:
            return None
        lengths = PyByteArray_FromStringAndSize(NULL, 4 * count)
        hash_index = PyByteArray_FromStringAndSize(NULL, 4 * keys)
        hashes = PyByteArray_FromStringAndSize(NULL, 8 * keys)
        at = <const uint8_t *>data.buf
        for index in range(count):
            (<uint32_t *>PyByteArray_AS_STRING(lengths))[index] = dmq_get32(at)
            total += dmq_get32(at)
            at += 4
        for index in range(keys):
            if dmq_get32(at) <= last or dmq_get32(at) >= count:
                return None
            last = dmq_get32(at)
            (<uint32_t *>PyByteArray_AS_STRING(hash_index))[index] = last
            at += 4
        for index in range(keys):
            if not dmq_get64(at):
                return None
            (<uint64_t *>PyByteArray_AS_STRING(hashes))[index] = dmq_get64(at)
            at += 8
    finally:
        PyBuffer_Release(&data)
    return lengths, hash_index, hashes, total


cdef class Numbers:
    """Numbers from 0 to 2**63-1.

    Raises:
        OverflowError: one does not fit.
    """

    cdef Py_ssize_t count
    cdef tuple _few
    cdef bint _has_view
    cdef Py_buffer _view

    def __cinit__(self, column):
        self._has_view = False
        if not PyTuple_CheckExact(column) and not PyList_CheckExact(column):
            PyObject_GetBuffer(column, &self._view, PyBUF_CONTIG_RO | PyBUF_FORMAT)
            self._has_view = True
            if self._view.ndim == 1 and self._is_known():
                self.count = self._view.shape[0]
                return
            PyBuffer_Release(&self._view)
            self._has_view = False
        self._few = tuple(column)
        self.count = PyTuple_GET_SIZE(self._few)

    cdef bint _is_known(self) noexcept:
        cdef const char *kind = self._view.format
        if kind == NULL or kind[1] != 0:
            return False
        if self._view.itemsize == 4:
            return kind[0] == b"I"
        return self._view.itemsize == 8 and (kind[0] in b"lqLQ")

    def __dealloc__(self):
        if self._has_view:
            PyBuffer_Release(&self._view)

    cdef inline int64_t get(self, Py_ssize_t index) except? -7:
        if not self._has_view:
            return <object>PyTuple_GET_ITEM(self._few, index)
        if self._view.itemsize == 4:
            return (<const uint32_t *>self._view.buf)[index]
        return (<const int64_t *>self._view.buf)[index]
