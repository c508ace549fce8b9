# A message that is sent by itself, see `dmq.client.producer.straight_path`. Between the calls of those who own the state,
# which stay in Python, each function does what takes several calls there.

cdef enum:
    NO_LIMIT = 0x7FFF_FFFF
    PLACE_QUEUE = 0xFF  # the queue of a place; what is above is its shard


def quick_find(general, any_place, tuple seconds not None, tuple sizes not None):
    """`LonePath._find` for a plain message to a lone broker.

    Parameters:
        seconds: that a topic is known for, and that must be left of the deadline.
        sizes: of the largest body, and of the longest key that needs no closer look.
    """
    cdef double fresh_seconds = seconds[0], lone_seconds = seconds[1]
    cdef Py_ssize_t body_max = sizes[0], key_max = sizes[1]

    def find(self, topic, message, durability, deadline):
        cdef double now, fetched_at
        cdef Py_ssize_t limit
        groove = self._grooves.get((topic, durability))
        if groove is None or not self._is_single:
            return general(self, topic, message, durability, deadline)
        lane = groove[0]
        if lane.under_way or lane.gathering is not None:  # as among many threads
            self.left += 1
            return None
        limit = self._sender.body_bytes_max
        if (
            lane.ready or lane.is_held or not _is_plain(<PyObject *>message)
            or _plain_size(message, min(limit, body_max), key_max) < 0
        ):
            return general(self, topic, message, durability, deadline)
        route, moment, connection = self._route_of(topic), self._monotonic(), self._router.link_for(topic, any_place)
        if route is None or connection is None or route.is_priority:
            return general(self, topic, message, durability, deadline)
        now, fetched_at = moment, route.fetched_at
        if now - fetched_at >= fresh_seconds or (deadline is not None and deadline - moment < lone_seconds):
            return general(self, topic, message, durability, deadline)
        return groove, connection, route.queues, moment

    return find


cdef inline Py_ssize_t _plain_size(message, Py_ssize_t body_max, Py_ssize_t key_max) noexcept:
    """`_simple_size` of a message for which `_is_plain` holds."""
    cdef PyObject *at = <PyObject *>message
    return _simple_size(<object>_field(at, BODY_FIELD), <object>_field(at, KEY_FIELD), body_max, key_max)


def quick_prepare(general):
    """`LonePath._prepare` for a plain message with a key of a size that was there before."""

    def prepare(self, topic, message):
        cdef Py_ssize_t size = -1
        cdef bytes raw_key = None
        encoder = self._encoder
        if _is_plain(<PyObject *>message):
            size = _plain_size(message, NO_LIMIT, NO_LIMIT)
        if size < 0 or size > encoder.whole_up_to:
            return general(self, topic, message)
        key = <object>_field(<PyObject *>message, KEY_FIELD)
        if key is not None:
            raw_key = (<str>key).encode("ascii")
        shape = encoder.shapes.get((topic, -1 if raw_key is None else PyBytes_GET_SIZE(raw_key)))
        if shape is None:
            return general(self, topic, message)
        return shape, <object>_field(<PyObject *>message, BODY_FIELD), raw_key, self._now_ms()

    return prepare


def quick_request_of(general):
    """`request_of` for a message that has a shape."""

    def request_of(groove, lone, correlation, prepared):
        if prepared[0] is None:
            return general(groove, lone, correlation, prepared)
        lane, front, level, _, _ = groove
        shape, body, key, sent_at_ms = prepared
        queue, sequence, _ = lone
        numbers = (correlation, queue & PLACE_QUEUE, lane.stream.producer_id, sequence, level, sent_at_ms)
        return lone_frame(front, shape, body, key, numbers)

    return request_of


def quick_stored(general, receipt_type, id_type, tuple names not None):
    """`LonePath.stored` for a message of a lone broker that nobody else waits for."""

    def stored(self, lane, lone, reply):
        place, sequence, _ = lone
        if place > PLACE_QUEUE:
            return general(self, lane, lone, reply)
        with self._sender.lock:
            is_over = self._accumulator.end_lone(lane, lone)
        if not is_over:
            return general(self, lane, lone, reply)
        self.taken += 1
        queue, offset, level = reply
        shared = (lane.stream.producer_id, sequence, offset, lane.place, queue, names[level], 0)
        return _receipt(shared, 0, receipt_type, id_type)

    return stored
