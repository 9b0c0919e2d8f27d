"""The loop and what it needs: model, batches, loss, optimizer, evaluation, sampling, the run folder."""
