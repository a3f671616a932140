"""What error feedback keeps."""

import torch

from lnn_lightning.communication.errors import Errors


def test_an_error_that_a_gradient_cancels_is_gone() -> None:
    errors = Errors()
    gradient = torch.tensor([1.0, 0.0])
    for given in (gradient, -gradient):
        wanted = errors.wanted("weight", given, 2.0)
        errors.keep("weight", wanted, torch.zeros(2), torch.zeros(2), 2.0)
    kept = errors.state_dict()["error.weight"]
    assert torch.equal(kept, torch.zeros(2)), kept


def test_an_error_waits_where_there_is_no_gradient() -> None:
    errors = Errors()
    for gradient in (torch.ones(2), torch.zeros(2)):
        wanted = errors.wanted("weight", gradient, 1.0)
        errors.keep("weight", wanted, torch.zeros(2), torch.zeros(2), 1.0)
    assert torch.equal(errors.state_dict()["error.weight"], torch.ones(2))
