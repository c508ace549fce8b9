"""Compiled loops over the records of a batch. Each function stands for a plain one of the same name in `dmq`, which is
its oracle in tests and does the work where this module was not built.

What always holds: no byte outside a buffer is read or written, whatever the bytes say; sums are made in 64 bits of
numbers below 2**32, where they cannot overflow. Nothing here raises for what is wrong with a message or a record: the
functions say that they cannot vouch for it, and the plain code finds the words. The interpreter's lock is held throughout.
"""

from types import MemberDescriptorType

from cpython.buffer cimport (
    PyBUF_CONTIG_RO, PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
)
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_CheckExact, PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset


cdef extern from "checksum.h":
    const char *DMQ_SOURCES
    void dmq_checksum_begin()
    uint32_t dmq_crc32c(const uint8_t *at, size_t size, uint32_t crc)
    void dmq_crc32c_three(const uint8_t **at, size_t size, uint32_t *crc)
    void dmq_crc32c_three_plain(const uint8_t **at, size_t size, uint32_t *crc)
    uint32_t dmq_crc32(const uint8_t *at, size_t size)
    uint16_t dmq_get16(const uint8_t *at)
    uint32_t dmq_get32(const uint8_t *at)
    uint64_t dmq_get64(const uint8_t *at)
    void dmq_put16(uint8_t *at, uint16_t value)
    void dmq_put32(uint8_t *at, uint32_t value)
    void dmq_put64(uint8_t *at, uint64_t value)
    bint dmq_is_ascii(const uint8_t *at, size_t size)


cdef extern from "Python.h":
    object PyUnicode_DecodeUTF8(const char *at, Py_ssize_t size, const char *errors)


dmq_checksum_begin()
SOURCES = DMQ_SOURCES.decode()

include "numbers.pxi"
include "check.pxi"
include "encode.pxi"
include "stamp.pxi"
include "message.pxi"
include "open.pxi"
include "straight.pxi"
include "frame.pxi"
include "gatherer.pxi"
include "lone.pxi"
include "push.pxi"
include "socket.pxi"
include "file.pxi"
