"""The protocol: pure, without sockets, clocks, threads, files or chance."""
