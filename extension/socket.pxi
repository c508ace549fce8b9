# A socket asked not to wait, see `dmq.client.connection.socket`.
#
# The library's own calls let go of the interpreter's lock. Where another thread wants it, a thread that only hands a few
# hundred bytes to the kernel then waits until that one lets go in its turn: longer than the call takes.

from cpython.exc cimport PyErr_SetFromErrno

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
