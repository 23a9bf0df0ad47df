"""A multi-modal perception model of two billion parameters: six cameras, lidar and a map, fused in one transformer."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

CAMERAS, HEIGHT, WIDTH, PATCH = 6, 256, 704, 16
PILLARS, PILLAR_DIM = 4096, 64
MAP_TOKENS, MAP_DIM = 256, 128
QUERIES, CLASSES, BOX = 900, 23, 10


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.before_mlp(x))


class Perception(nn.Module):
    """Boxes and classes of 900 objects from a sample of all sensors."""

    def __init__(
        self,
        camera_dim: int = 1536,
        camera_layers: int = 24,
        lidar_dim: int = 1024,
        lidar_layers: int = 12,
        dim: int = 2048,
        num_layers: int = 23,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, camera_dim, PATCH, PATCH)
        self.camera = nn.ModuleList(Block(camera_dim, camera_dim // 128) for _ in range(camera_layers))
        self.pool = nn.Conv2d(camera_dim, dim, 2, 2)
        self.pillars = nn.Linear(PILLAR_DIM, lidar_dim)
        self.lidar = nn.ModuleList(Block(lidar_dim, lidar_dim // 128) for _ in range(lidar_layers))
        self.lidar_out = nn.Conv1d(lidar_dim, dim, 4, 4)
        self.map = nn.Linear(MAP_DIM, dim)
        self.queries = nn.Parameter(torch.zeros(QUERIES, dim))
        self.fusion = nn.ModuleList(Block(dim, dim // 128) for _ in range(num_layers))
        self.boxes, self.classes = nn.Linear(dim, BOX), nn.Linear(dim, CLASSES)

    def forward(self, images: torch.Tensor, pillars: torch.Tensor, roads: torch.Tensor) -> torch.Tensor:
        batch = images.shape[0]
        seen = self.patches(images.flatten(0, 1))
        rows, columns = seen.shape[-2:]
        x = seen.flatten(2).transpose(1, 2)
        for block in self.camera:
            x = block(x)
        seen = self.pool(x.transpose(1, 2).unflatten(2, (rows, columns)))
        cameras = seen.flatten(2).transpose(1, 2).reshape(batch, -1, seen.shape[1])
        points = self.pillars(pillars)
        for block in self.lidar:
            points = block(points)
        lidar = self.lidar_out(points.transpose(1, 2)).transpose(1, 2)
        x = torch.cat([self.queries.expand(batch, -1, -1), cameras, lidar, self.map(roads)], dim=1)
        for block in self.fusion:
            x = block(x)
        found = x[:, :QUERIES]
        return torch.cat([self.boxes(found), self.classes(found)], dim=-1)


def loss(model: Perception, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model(batch["images"], batch["pillars"], batch["roads"])
    boxes = functional.l1_loss(found[..., :BOX], batch["boxes"])
    classes = functional.cross_entropy(found[..., BOX:].flatten(0, 1), batch["classes"].flatten())
    return boxes + classes


def data(num_samples: int = 4, seed: int = 0) -> Dataset[tuple[torch.Tensor, ...]]:
    """Random samples of the right shapes: planning reads shapes only."""
    make = torch.Generator().manual_seed(seed)
    return Samples(
        torch.randn(num_samples, CAMERAS, 3, HEIGHT, WIDTH, generator=make),
        torch.randn(num_samples, PILLARS, PILLAR_DIM, generator=make),
        torch.randn(num_samples, MAP_TOKENS, MAP_DIM, generator=make),
        torch.randn(num_samples, QUERIES, BOX, generator=make),
        torch.randint(CLASSES, (num_samples, QUERIES), generator=make),
    )


class Samples(TensorDataset):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return dict(zip(("images", "pillars", "roads", "boxes", "classes"), super().__getitem__(index), strict=True))
