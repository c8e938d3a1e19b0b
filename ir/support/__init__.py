"""What is no part of the representation: errors, files, names, caches, threads, discovery."""
