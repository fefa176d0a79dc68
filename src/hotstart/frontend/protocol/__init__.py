"""The OpenAI protocol as msgspec structs: one source for validation, encoding and the OpenAPI document."""
