"""STUB until the real one arrives (helper: overwrite this file)."""
def peek_batch(trainer):
    source = trainer.fit_loop._data_source if trainer.state.fn == "fit" else trainer._active_loop._data_source
    batch = next(iter(source.dataloader()), None)
    return batch
