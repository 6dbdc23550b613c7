"""The real runtime: processes, sockets, files."""
