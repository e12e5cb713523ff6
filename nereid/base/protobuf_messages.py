"""Protobuf messages of which only some fields are declared; all others are preserved."""

from collections.abc import Mapping
from typing import Any

# Message -> field -> its number, and its message, or "" for text; `*` marks a repeated field.
Schema = Mapping[str, Mapping[str, tuple[int, str]]]


def message_class(schema: Schema) -> Any:
    """Return the class of the first message of a schema."""
    # Imported here because protobuf slows the start of each command.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="messages.proto", package="messages")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for field, (number, target) in fields.items():
            message.field.add(
                name=field,
                number=number,
                label=kinds.LABEL_REPEATED if target.endswith("*") else kinds.LABEL_OPTIONAL,
                type=kinds.TYPE_MESSAGE if target else kinds.TYPE_STRING,
                type_name=f".messages.{target.rstrip('*')}" if target else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"messages.{next(iter(schema))}"))
