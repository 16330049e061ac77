"""What imports neither MPI nor training: errors, files, launchers' variables, output, signals."""
