"""Between etcd's messages and the store's values: ranges, entries, compares and operations."""

from __future__ import annotations

from collections.abc import Sequence

from baguarun.elastic.membership.etcdpb import etcd_pb2 as pb
from baguarun.elastic.membership.store import Compare, Delete, Entry, Put, PutIfAbsent


def end_of(prefix: str) -> bytes:
    """The first key after all that start with `prefix`; an empty prefix means every key."""
    key = prefix.encode().rstrip(b"\xff")
    return key[:-1] + bytes([key[-1] + 1]) if key else b"\0"


def entry_of(kv: pb.KeyValue) -> Entry:
    return Entry(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def compare_request(compare: Compare) -> pb.Compare:
    """etcd's form of one condition; an absent key has create_revision and mod_revision 0."""
    key = compare.key.encode()
    if compare.prefix:
        if compare.exists is not False:
            raise ValueError(f"compare {compare.key}: prefix=True goes with exists=False only")
        return pb.Compare(
            target=pb.Compare.CREATE, key=key or b"\0", range_end=end_of(compare.key), create_revision=0
        )
    if compare.exists is not None:
        result = pb.Compare.GREATER if compare.exists else pb.Compare.EQUAL
        return pb.Compare(target=pb.Compare.CREATE, result=result, key=key, create_revision=0)
    if compare.mod_revision is not None:
        return pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=compare.mod_revision)
    if compare.value is not None:
        return pb.Compare(target=pb.Compare.VALUE, key=key, value=compare.value)
    raise ValueError(f"compare {compare.key}: want one of exists, value, mod_revision")


def txn_request(
    compares: Sequence[Compare], operations: Sequence[Put | PutIfAbsent | Delete]
) -> pb.TxnRequest:
    return pb.TxnRequest(
        compare=[compare_request(compare) for compare in compares],
        success=[_operation(operation) for operation in operations],
    )


def delete_request(key: str, prefix: bool) -> pb.DeleteRangeRequest:
    return pb.DeleteRangeRequest(key=key.encode() or b"\0", range_end=end_of(key) if prefix else b"")


def _operation(operation: Put | PutIfAbsent | Delete) -> pb.RequestOp:
    if isinstance(operation, Delete):
        return pb.RequestOp(request_delete_range=delete_request(operation.key, operation.prefix))
    put = pb.PutRequest(key=operation.key.encode(), value=operation.value, lease=operation.lease)
    if isinstance(operation, Put):
        return pb.RequestOp(request_put=put)
    absent = compare_request(Compare(operation.key, exists=False))
    return pb.RequestOp(request_txn=pb.TxnRequest(compare=[absent], success=[pb.RequestOp(request_put=put)]))
