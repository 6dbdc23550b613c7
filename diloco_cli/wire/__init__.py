"""What travels between learners and syncer: frames, messages, codecs. Pure, no I/O."""
