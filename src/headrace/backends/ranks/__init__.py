"""Ranks: N copies of one program, called together. As processes of this machine, as Ray actors, or one on a thread."""
