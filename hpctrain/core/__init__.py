"""Parts that know neither MPI nor training: errors, files, arrays of two libraries, signals."""
