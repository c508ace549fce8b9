# A column of numbers, as few records have it (a tuple or list) and many (an array of numpy).

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
