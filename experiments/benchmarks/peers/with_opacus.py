"""Logistic regression by Opacus, whose loader draws Poisson batches."""

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset


def fit(work):
    torch.manual_seed(work.seed)
    torch.set_num_threads(1)
    rows = TensorDataset(torch.from_numpy(work.x), torch.from_numpy(work.y))
    loader = DataLoader(rows, batch_size=work.batch_size)
    model = torch.nn.Linear(work.x.shape[1], 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=work.learning_rate)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=work.epsilon,
        target_delta=work.delta,
        epochs=work.epochs,
        max_grad_norm=work.l2_clip_norm,
    )
    criterion, steps = torch.nn.BCEWithLogitsLoss(), 0
    for _ in range(work.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x).squeeze(1), y).backward()
            optimizer.step()
            steps += 1
    with torch.no_grad():
        scores = model(torch.from_numpy(work.test_x)).squeeze(1).numpy()
    return scores, {
        "printed": engine.get_epsilon(work.delta),
        "sampler": "poisson",
        "noise_multiplier": optimizer.noise_multiplier,
        "sampling_prob": loader.sample_rate,
        "steps": steps,
    }
