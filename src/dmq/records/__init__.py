"""Records: the byte layout of one message, and everything that reads or writes it.

`layout` draws the bytes, `attributes` and `hashes` what stands in them, `compression` what becomes of bodies. `builder`
writes one record from its parts, `encoder` the messages of a producer, with `assembler` for many at once. `view` reads
one record, `columns` many. A `block` holds bodies of a batch that are compressed together. `check` says whether bytes
are records at all, and `stand_in` is for those that are none. `move` writes records again under another topic, `copy`
as they are, `replay` from an archive. Nothing here does I/O or asks for the time.
"""

from dmq.records.attributes import ANY_QUEUE, Attributes, decode_attributes, encode_attributes, read_entries
from dmq.records.check import batch_rules, check_batch, find_corrupt
from dmq.records.columns import Columns, decode_columns
from dmq.records.compression import Compressor, decompress
from dmq.records.encoder import (
    Alike,
    EncodedBatch,
    EncodeOptions,
    LoneRecord,
    encode_batch,
    encode_lone,
    encode_plain,
    is_plain,
)
from dmq.records.hashes import business_hash, id_hash, key_hash, tag_hash
from dmq.records.layout import FIXED_BYTES, MAGIC, RECORD_BYTES_MIN, Stamp, gather, scatter, stamp_few
from dmq.records.move import DeadReason, moved_record
from dmq.records.stand_in import placeholder, stand_in
from dmq.records.view import RecordView, address_text, iter_records

__all__ = [
    "ANY_QUEUE",
    "FIXED_BYTES",
    "MAGIC",
    "RECORD_BYTES_MIN",
    "Alike",
    "Attributes",
    "Columns",
    "Compressor",
    "DeadReason",
    "EncodeOptions",
    "EncodedBatch",
    "LoneRecord",
    "RecordView",
    "Stamp",
    "address_text",
    "batch_rules",
    "business_hash",
    "check_batch",
    "decode_attributes",
    "decode_columns",
    "decompress",
    "encode_attributes",
    "encode_batch",
    "encode_lone",
    "encode_plain",
    "find_corrupt",
    "gather",
    "id_hash",
    "is_plain",
    "iter_records",
    "key_hash",
    "moved_record",
    "placeholder",
    "read_entries",
    "scatter",
    "stamp_few",
    "stand_in",
    "tag_hash",
]
