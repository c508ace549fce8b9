# A socket asked not to wait, see `dmq.client.connection.socket`.
#
# The library's own calls let go of the interpreter's lock. Where another thread wants it, a thread that only hands a few
# hundred bytes to the kernel then waits until that one lets go in its turn: longer than the call takes.

from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from libc.errno cimport EINTR, errno

cdef extern from "<sys/socket.h>" nogil:
    int MSG_DONTWAIT
    int MSG_NOSIGNAL
    Py_ssize_t send(int descriptor, const void *at, size_t size, int flags)
    Py_ssize_t recv(int descriptor, void *at, size_t size, int flags)


def send_now(int descriptor, bytes data not None):
    """How many bytes a socket takes without waiting. Raises what `socket.send` raises."""
    cdef Py_ssize_t sent = send(descriptor, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), MSG_DONTWAIT | MSG_NOSIGNAL)
    if sent < 0:
        PyErr_SetFromErrno(OSError)
    return sent


def receive_now(int descriptor, buffer):
    """How many bytes a socket gives without waiting, into a buffer; 0 at the end. Raises what `socket.recv_into` raises."""
    cdef Py_buffer room
    cdef Py_ssize_t size
    PyObject_GetBuffer(buffer, &room, PyBUF_WRITABLE)
    try:
        size = recv(descriptor, room.buf, room.len, MSG_DONTWAIT)
        if size < 0:
            PyErr_SetFromErrno(OSError)
        return size
    finally:
        PyBuffer_Release(&room)


cdef enum:
    ANSWER_ROOM = 4096


def ask_now(wire, frame):
    """Have a wire's socket take a frame at once, and wait for what comes: as `Wire.write` and `Wire.answer`, one after
    the other. None if nothing was sent: others write, or the socket takes nothing, or the frame is not bytes.

    Raises what `socket.recv` raises.
    """
    cdef int descriptor = wire.descriptor
    cdef char[ANSWER_ROOM] room
    cdef Py_ssize_t size
    if not PyBytes_CheckExact(frame) or wire.out_bytes or wire.is_disposed or not wire.writing.acquire(False):
        return None
    try:
        size = send(descriptor, PyBytes_AS_STRING(frame), PyBytes_GET_SIZE(frame), MSG_DONTWAIT | MSG_NOSIGNAL)
        if 0 <= size < PyBytes_GET_SIZE(frame):
            wire.keep_rest(frame, size)
            raise BlockingIOError
    finally:
        wire.writing.release()
    if size < 0:
        return None
    while True:
        with nogil:
            size = recv(descriptor, room, ANSWER_ROOM, 0)
        if size >= 0:
            return PyBytes_FromStringAndSize(room, size)
        if errno != EINTR:
            PyErr_SetFromErrno(OSError)
        PyErr_CheckSignals()
