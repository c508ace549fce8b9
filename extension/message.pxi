# The fields of many `Message` objects, read where their slots are, see `dmq.records.encoder`.

cdef extern from "structmember.h":
    ctypedef struct PyMemberDef:
        Py_ssize_t offset
        int type
    int T_OBJECT_EX


cdef extern from "Python.h":
    ctypedef struct PyMemberDescrObject:
        PyMemberDef *d_member
    PyObject *Py_TYPE(PyObject *)
    PyObject *Py_False
    bint PyUnicode_IS_ASCII(object)


cdef enum:
    BODY_FIELD, KEY_FIELD, TAG_FIELD, BUSINESS_ID_FIELD, ORDERED_FIELD, PRIORITY_FIELD, PROPERTIES_FIELD, FIELDS

_NAMES = ("body", "key", "tag", "business_id", "ordered", "priority", "properties")
cdef Py_ssize_t[FIELDS] offsets_of_fields
cdef object message_type = None
cdef object usual_priority = None


def bind_message(kind, priority):
    """Learn where the fields of a message are; False if that cannot be told."""
    global message_type, usual_priority
    cdef int number = 0
    cdef PyMemberDef *member
    cdef Py_ssize_t[FIELDS] found
    for name in _NAMES:
        field = kind.__dict__.get(name)
        if type(field) is not MemberDescriptorType:
            return False
        member = (<PyMemberDescrObject *><PyObject *>field).d_member
        if member.type != T_OBJECT_EX:
            return False
        found[number] = member.offset
        number += 1
    for number in range(FIELDS):
        offsets_of_fields[number] = found[number]
    message_type, usual_priority = kind, priority
    return True


cdef inline PyObject *_field(PyObject *message, int number) noexcept:
    return (<PyObject **>(<char *>message + offsets_of_fields[number]))[0]


cdef inline bint _is_plain(PyObject *message) noexcept:
    """Whether a message has a body and at most a key."""
    return (
        Py_TYPE(message) == <PyObject *>message_type
        and _field(message, TAG_FIELD) == <PyObject *>None
        and _field(message, BUSINESS_ID_FIELD) == <PyObject *>None
        and _field(message, PROPERTIES_FIELD) == <PyObject *>None
        and _field(message, ORDERED_FIELD) == Py_False
        and _field(message, PRIORITY_FIELD) == <PyObject *>usual_priority
        and _field(message, BODY_FIELD) != NULL
        and _field(message, KEY_FIELD) != NULL
    )


cdef inline Py_ssize_t _simple_size(body, key, Py_ssize_t body_bytes_max, Py_ssize_t key_max) noexcept:
    if not PyBytes_CheckExact(body) or PyBytes_GET_SIZE(body) > body_bytes_max:
        return -1
    if key is not None and not (PyUnicode_CheckExact(key) and PyUnicode_IS_ASCII(key) and len(<str>key) <= key_max):
        return -1
    return PyBytes_GET_SIZE(body)


def simple_size(body, key, Py_ssize_t body_bytes_max, Py_ssize_t key_max):
    """How large a body is; -1 if it is larger than that or not bytes, or the key is neither short ASCII text nor None."""
    return _simple_size(body, key, body_bytes_max, key_max)


def plain_columns(list messages not None):
    """Bodies and keys of messages that have nothing else, and how large the bodies are together.

    None if one of them has more, or a body that is not bytes.
    """
    cdef Py_ssize_t count = PyList_GET_SIZE(messages), index
    cdef int64_t total = 0
    cdef PyObject *message
    cdef list bodies = [None] * count, keys = [None] * count
    if message_type is None or not count or PyList_GET_SIZE(messages) != count:
        return None
    # Nothing is allocated from here on, so nobody changes the messages meanwhile.
    for index in range(count):
        message = PyList_GET_ITEM(messages, index)
        if not _is_plain(message) or not PyBytes_CheckExact(<object>_field(message, BODY_FIELD)):
            return None
        total += PyBytes_GET_SIZE(<object>_field(message, BODY_FIELD))
        bodies[index] = <object>_field(message, BODY_FIELD)
        keys[index] = <object>_field(message, KEY_FIELD)
    return bodies, keys, total
