"""Event logs: where a controller's records become durable."""
