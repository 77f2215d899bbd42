from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NestedPositionInfo(_message.Message):
    __slots__ = ("ledger_id", "entry_id")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ...) -> None: ...

class MessageRange(_message.Message):
    __slots__ = ("lower_endpoint", "upper_endpoint")
    LOWER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    UPPER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    lower_endpoint: NestedPositionInfo
    upper_endpoint: NestedPositionInfo
    def __init__(self, lower_endpoint: _Optional[_Union[NestedPositionInfo, _Mapping]] = ..., upper_endpoint: _Optional[_Union[NestedPositionInfo, _Mapping]] = ...) -> None: ...

class LongProperty(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class StringProperty(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class BatchedEntryDeletionIndexInfo(_message.Message):
    __slots__ = ("position", "delete_set")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DELETE_SET_FIELD_NUMBER: _ClassVar[int]
    position: NestedPositionInfo
    delete_set: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, position: _Optional[_Union[NestedPositionInfo, _Mapping]] = ..., delete_set: _Optional[_Iterable[int]] = ...) -> None: ...

class LongListMap(_message.Message):
    __slots__ = ("key", "values")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    key: int
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[int] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...

class PositionInfo(_message.Message):
    __slots__ = ("ledger_id", "entry_id", "individual_deleted_messages", "properties", "batched_entry_deletion_index_info", "individual_deleted_message_ranges", "idle_since")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    INDIVIDUAL_DELETED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    BATCHED_ENTRY_DELETION_INDEX_INFO_FIELD_NUMBER: _ClassVar[int]
    INDIVIDUAL_DELETED_MESSAGE_RANGES_FIELD_NUMBER: _ClassVar[int]
    IDLE_SINCE_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    individual_deleted_messages: _containers.RepeatedCompositeFieldContainer[MessageRange]
    properties: _containers.RepeatedCompositeFieldContainer[LongProperty]
    batched_entry_deletion_index_info: _containers.RepeatedCompositeFieldContainer[BatchedEntryDeletionIndexInfo]
    individual_deleted_message_ranges: _containers.RepeatedCompositeFieldContainer[LongListMap]
    idle_since: int
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., individual_deleted_messages: _Optional[_Iterable[_Union[MessageRange, _Mapping]]] = ..., properties: _Optional[_Iterable[_Union[LongProperty, _Mapping]]] = ..., batched_entry_deletion_index_info: _Optional[_Iterable[_Union[BatchedEntryDeletionIndexInfo, _Mapping]]] = ..., individual_deleted_message_ranges: _Optional[_Iterable[_Union[LongListMap, _Mapping]]] = ..., idle_since: _Optional[int] = ...) -> None: ...

class ManagedCursorInfo(_message.Message):
    __slots__ = ("cursors_ledger_id", "mark_delete_ledger_id", "mark_delete_entry_id", "individual_deleted_messages", "properties", "last_active", "batched_entry_deletion_index_info", "cursor_properties", "idle_since", "ackstate_term")
    CURSORS_LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    MARK_DELETE_LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    MARK_DELETE_ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    INDIVIDUAL_DELETED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    BATCHED_ENTRY_DELETION_INDEX_INFO_FIELD_NUMBER: _ClassVar[int]
    CURSOR_PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    IDLE_SINCE_FIELD_NUMBER: _ClassVar[int]
    ACKSTATE_TERM_FIELD_NUMBER: _ClassVar[int]
    cursors_ledger_id: int
    mark_delete_ledger_id: int
    mark_delete_entry_id: int
    individual_deleted_messages: _containers.RepeatedCompositeFieldContainer[MessageRange]
    properties: _containers.RepeatedCompositeFieldContainer[LongProperty]
    last_active: int
    batched_entry_deletion_index_info: _containers.RepeatedCompositeFieldContainer[BatchedEntryDeletionIndexInfo]
    cursor_properties: _containers.RepeatedCompositeFieldContainer[StringProperty]
    idle_since: int
    ackstate_term: int
    def __init__(self, cursors_ledger_id: _Optional[int] = ..., mark_delete_ledger_id: _Optional[int] = ..., mark_delete_entry_id: _Optional[int] = ..., individual_deleted_messages: _Optional[_Iterable[_Union[MessageRange, _Mapping]]] = ..., properties: _Optional[_Iterable[_Union[LongProperty, _Mapping]]] = ..., last_active: _Optional[int] = ..., batched_entry_deletion_index_info: _Optional[_Iterable[_Union[BatchedEntryDeletionIndexInfo, _Mapping]]] = ..., cursor_properties: _Optional[_Iterable[_Union[StringProperty, _Mapping]]] = ..., idle_since: _Optional[int] = ..., ackstate_term: _Optional[int] = ...) -> None: ...
