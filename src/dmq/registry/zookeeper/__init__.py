"""The registry in a ZooKeeper ensemble, over kazoo.

In reading order: `ensemble` is what a URL says of one, `server` what each of its servers says of itself; `multi` makes
a write one request and tells why one was refused; `link` is one session, with kazoo's threads; `client` is the
`Registry` of a broker, from session to session.
"""
