"""Messages between GPUs: device of a rank, staging, queues of transfers, NCCL."""
