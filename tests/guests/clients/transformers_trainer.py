"""The Trainer of transformers on the backend: a tiny BERT with random weights, from no hub."""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

dist.init_process_group(sys.argv[2])


class Tokens(Dataset):
    """Sequences whose class is in their first token."""

    def __len__(self):
        return 32

    def __getitem__(self, i):
        ids = torch.full((8,), 1 + i % 2)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones(8, dtype=torch.long),
            "labels": i % 2,
        }


torch.manual_seed(0)
config = BertConfig(
    vocab_size=16,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=32 // dist.get_world_size(),
    num_train_epochs=3,
    learning_rate=0.1,
    optim="sgd",
    lr_scheduler_type="constant",
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    dataloader_drop_last=True,
)
result = Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
if dist.get_rank() == 0:
    print(f"parameters {sum(p.double().sum().item() for p in model.parameters()):.12f}")
    print("loss", result.training_loss, file=sys.stderr)
dist.destroy_process_group()
