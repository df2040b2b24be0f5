"""Mind: pure decisions. No clock, no file, no socket, no thread, no luck; time comes in as an argument."""
