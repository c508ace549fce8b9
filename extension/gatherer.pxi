# A flood of `send_async`, see `dmq.client.producer.core`.
#
# What takes or changes the room of a batch holds the producer's lock. The compiled way does not take it: it looks whether
# somebody has it, and then does all at once, since it keeps the interpreter's lock and runs no Python code. So an exception
# of a signal's handler finds all of a message done, or nothing.

from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_SET_ITEM
from cpython.type cimport PyType_GenericAlloc


cdef class Gatherer:
    """Puts plain messages into the batch that gathers in one lane of a producer, as long as its reserved room lasts.

    Parameters:
        is_locked: whether any thread has the producer's lock.
        key_max: the longest key that needs no closer look.
    """

    cdef readonly object batch  # whose room it has
    cdef object _is_locked, _topic, _durability
    cdef list _bodies, _keys
    cdef Py_ssize_t _room, _count, _body_bytes_max, _key_max, _message_bytes

    def __init__(self, is_locked, Py_ssize_t key_max, Py_ssize_t message_bytes):
        self._is_locked = is_locked
        self._key_max = key_max
        self._message_bytes = message_bytes

    def open(self, str topic not None, str durability not None, batch, Py_ssize_t body_bytes_max):
        """Take over the room of a batch, under the producer's lock. To be given back by `close`."""
        cdef list bodies = batch.bodies, keys = batch.keys
        cdef Py_ssize_t room = batch.room, count = batch.count
        self.close()
        batch.room = 0
        self._topic, self._durability, self.batch, self._bodies, self._keys = topic, durability, batch, bodies, keys
        self._room, self._count, self._body_bytes_max = room, count, body_bytes_max

    def close(self):
        """Give the room back to its batch, as far as it is not used; under the producer's lock."""
        if self.batch is not None:
            self.batch.count = self._count
            self.batch.room = self._room
            self.batch = self._bodies = self._keys = None

    cdef Py_ssize_t put(self, topic, durability, body, key) except -2:
        """The place of a message in the batch; -1 if it is not plain, or there is no room for it."""
        cdef Py_ssize_t size
        if self.batch is None or not _is_same(topic, self._topic) or not _is_same(durability, self._durability):
            return -1
        size = _simple_size(body, key, self._body_bytes_max, self._key_max) + self._message_bytes
        if size < self._message_bytes or size > self._room or self._is_locked():
            return -1
        self._bodies.append(body)
        try:
            self._keys.append(key)
        except MemoryError:
            self._bodies.pop()
            raise
        self._room -= size
        self._count += 1
        return self._count - 1

    def take(self, topic, durability, body, key):
        """Put a message there: its batch and its place in it; None where `put` says no."""
        cdef Py_ssize_t index = self.put(topic, durability, body, key)
        return None if index < 0 else (self.batch, index)


cdef inline bint _is_same(given, str known) except -1:
    return given is known or (PyUnicode_CheckExact(given) and <str>given == known)


def quick_send_async(general, future, usual_priority):
    """`Producer.send_async` for a plain message that finds room; all others go the general way."""

    def send_async(
        self, topic, body, *, key=None, durability="flushed", tag=None, business_id=None, ordered=False,
        priority=usual_priority, delay=0.0, deliver_at=None, ttl=None, properties=None, consumed_by="", id=None,
        on_delivery=None
    ):
        cdef Py_ssize_t index
        cdef Gatherer gatherer
        if (
            tag is None and business_id is None and ordered is False and priority is usual_priority and not delay
            and deliver_at is None and ttl is None and properties is None and not consumed_by and id is None
            and on_delivery is None
        ):
            gatherer = self._gatherer
            index = gatherer.put(topic, durability, body, key)
            if index >= 0:
                return future(gatherer.batch, index)
        return general(
            self, topic, body, key=key, tag=tag, business_id=business_id, ordered=ordered, priority=priority,
            delay=delay, deliver_at=deliver_at, ttl=ttl, properties=properties, durability=durability,
            consumed_by=consumed_by, id=id, on_delivery=on_delivery,
        )

    return send_async


def quick_result(general, receipt_type, id_type):
    """`SendFuture.result` for a message of a batch of which some receipt was made before."""

    def result(self, timeout=None):
        shared = self._outcome._shared
        if shared is None:
            return general(self, timeout)
        return _receipt(shared, self._index, receipt_type, id_type)

    return result


cdef _receipt(tuple shared, index, receipt_type, type id_type):
    """What `dmq.client.producer.outcome.Outcome.receipt` makes of what the messages of a batch share."""
    producer_id, first_sequence, first_offset, topic, queue, durability, shard = shared
    cdef object number = first_sequence + index  # an object from the beginning: the id keeps a reference to it
    message_id = PyType_GenericAlloc(id_type, 2)
    Py_INCREF(producer_id)
    PyTuple_SET_ITEM(message_id, 0, producer_id)
    Py_INCREF(number)
    PyTuple_SET_ITEM(message_id, 1, number)
    return receipt_type(message_id, topic, queue, -1 if first_offset < 0 else first_offset + index, durability, shard)
