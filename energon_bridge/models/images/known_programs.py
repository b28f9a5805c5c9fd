"""What the image processors of transformers draw: one table, by the names of their classes.

`own` finds functions of a processor's module by name, so a size is rounded by the very code that the processor runs.
What is drawn here is compared with the processor before it is used (`pixels.py`).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch

from energon_bridge.models.images.programs import (
    Colour,
    Count,
    Draw,
    Drawing,
    DrawnImage,
    Output,
    PatchedImage,
    PixelSize,
    Settings,
    UndrawnError,
)
from energon_bridge.models.images.resize import best_resolution, fitted


def own(p: Settings, name: str) -> Any:
    """Return a function of the modules in which a processor and its base classes are written."""
    modules = (sys.modules[kind.__module__] for kind in type(p.processor).__mro__)
    found = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    if found is None:
        raise UndrawnError(f"there is no {name} beside its class")
    return found


def asked(p: Settings, name: str, **arguments: Any) -> Any:
    """Return what a function beside the processor, or a method, returns; of the arguments it gets those it takes."""
    function = getattr(p.processor, name, None) or own(p, name)
    taken = inspect.signature(function).parameters
    return function(**{key: value for key, value in arguments.items() if key in taken})


def smart(p: Settings, image: DrawnImage) -> DrawnImage:
    """Scale an image so that its area lies between bounds, as the `smart_resize` of the processor's module says."""
    least, largest = p.side("shortest_edge", "longest_edge")
    if p.max_image_tokens:
        least, largest = p.min_image_tokens, p.max_image_tokens
    if not least or not largest:
        raise UndrawnError(f"its size is {p.size!r}")
    given = {"height": image.size[0], "width": image.size[1], "factor": p.patch_size * p.merge_size}
    given |= {"num_frames": p.temporal_patch_size, "temporal_factor": p.temporal_patch_size}
    return image.scaled(asked(p, "smart_resize", **given, min_pixels=least, max_pixels=largest))


def _usual(p: Settings, image: DrawnImage) -> DrawnImage:
    """Return an image as the base classes scale it: to a size, to one side, or into a box."""
    if not p.do_resize:
        return image
    short, long, height, width, high, wide = p.side(
        "shortest_edge", "longest_edge", "height", "width", "max_height", "max_width"
    )
    if short and long:
        return image.scaled(own(p, "get_size_with_aspect_ratio")(image.size, short, long))
    if short:
        least, most = min(image.size), max(image.size)
        other = int(short * most / least)
        return image.scaled((other, short) if image.size[1] <= image.size[0] else (short, other))
    if high and wide:
        return image.scaled(own(p, "get_image_size_for_max_height_width")(image.size, high, wide))
    if height and width:
        return image.scaled((height, width))
    raise UndrawnError(f"its size is {p.size!r}")


def _finished(p: Settings, image: DrawnImage) -> DrawnImage:
    """Scale and crop as the base classes do."""
    image = _usual(p, image)
    return image.cropped(p.box("crop_size"), floor=p.floor) if p.do_center_crop else image


def whole(*pictures: DrawnImage, lead: tuple[int, ...] = ()) -> Output:
    """Return pictures of one size, each as (3, height, width)."""
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        raise ValueError(f"its pictures have the sizes {sorted(sizes)}")
    return Output([PatchedImage(picture=picture) for picture in pictures], (3, *sizes.pop()), lead)


def on_tiles(
    sheet: DrawnImage,
    tile: PixelSize,
    view: DrawnImage | None = None,
    *,
    first: bool = False,
    lead: tuple[int, ...] = (),
) -> Output:
    """Return the tiles of a sheet, row by row, and a view of the whole behind several of them, or `first`."""
    parts = [PatchedImage(picture=sheet, patch=tile)]
    if view is not None and parts[0].count > 1:
        parts.insert(0 if first else 1, PatchedImage(picture=view))
    return Output(parts, (3, *tile), lead)


def on_grid(image: DrawnImage, tile: PixelSize, grid: PixelSize) -> DrawnImage:
    """Return an image scaled to rows and columns of tiles."""
    return image.scaled((tile[0] * grid[0], tile[1] * grid[1]))


def pixelwise(image: DrawnImage, side: int) -> PatchedImage:
    """Return patches with the channels of a pixel side by side."""
    return PatchedImage(picture=image, patch=(side, side), order="pixels")


def plain(p: Settings, image: DrawnImage, colour: Colour | None = None) -> Drawing:
    """Scale, crop, rescale, normalise; with a colour, pad to a square first."""
    written = next((kind for kind in type(p.processor).__mro__ if "_preprocess" in vars(kind)), object)
    if colour is None and (p.do_pad or _short(written) not in PROGRAMS):
        raise UndrawnError("it pads" if p.do_pad else "its class has a way of its own that no program draws")
    image = _finished(p, image if colour is None else image.squared(colour))
    return Drawing(pixels={"pixel_values": whole(image)})


def video_llava(p: Settings, image: DrawnImage) -> Drawing:
    if min(image.size) <= 4:
        raise UndrawnError("it guesses where the channels of so narrow an image are")
    name = "pixel_values" if p.return_legacy_image_output is False else "pixel_values_images"
    return Drawing(pixels={name: whole(_finished(p, image))})


def _colour(p: Settings, mean: str = "image_mean") -> Colour:
    values = getattr(p, mean)
    red, green, blue = (127, 127, 127) if values is None else (int(one * 255) for one in values)
    return red, green, blue


def llava(p: Settings, image: DrawnImage) -> Drawing:
    return plain(p, image, _colour(p)) if p.do_pad else plain(p, image)


def llava_next(p: Settings, image: DrawnImage) -> Drawing:
    """The whole image, then the tiles of the best resolution, on black; in a sample of several (OneVision), squares."""
    box = p.side("height", "width")
    overview = box if all(box) else p.side("shortest_edge") * 2
    side = (p.side("height", of="crop_size")[0] if p.crop_size else 0) or box[0] or overview[0]
    facts: dict[str, Any] = {"image_sizes": [list(image.size)]}
    if "batch_num_images" in (p.model_input_names or ()):
        facts["batch_num_images"] = Count()
    if not p.alone and "batch_num_images" in facts:
        pictures = [image.squared(_colour(p))]
    else:
        room = best_resolution(image.size, [(int(rows), int(columns)) for rows, columns in p.image_grid_pinpoints])
        sheet = image.scaled(fitted(image.size, room)).centred(room)
        pictures = [image.scaled(cast(PixelSize, overview)), *sheet.tiles((side, side))]
        if (side, side) == _finished(p, DrawnImage((side, side))).size and not any(one % side for one in room):
            parts = [PatchedImage(picture=_finished(p, pictures[0])), PatchedImage(picture=sheet, patch=(side, side))]
            return Drawing(
                pixels={"pixel_values": Output(parts, (3, side, side), (1,))}, facts=facts, padded=bool(p.do_pad)
            )
    pixels = whole(*(_finished(p, one) for one in pictures), lead=(1,))
    return Drawing(pixels={"pixel_values": pixels}, facts=facts, padded=bool(p.do_pad))


def patched(
    p: Settings,
    image: DrawnImage,
    sized: Callable[[Settings, DrawnImage], DrawnImage] = smart,
    *,
    grouped: bool = True,
    order: Any = "channels",
    flat: bool = True,
    merges: bool = False,
) -> Drawing:
    """Patches of an image at its own resolution, and its grid.

    Args:
        sized: Scales the image.
        grouped: Whether the patches of a token are adjacent.
        order: See `PatchedImage`.
        flat: Whether a patch is one axis.
        merges: Whether the size of groups is returned.
    """
    image = sized(p, image) if p.do_resize else image
    side, times = int(p.patch_size), int(p.temporal_patch_size or 1)
    if order == "pixels" and times > 1:
        raise UndrawnError("it repeats an image for each value")
    part = PatchedImage(
        picture=image, patch=(side, side), merge=int(p.merge_size) if grouped else 1, times=times, order=order
    )
    item = (3 * times * side**2,) if flat else (3 * times, side, side)
    facts: dict[str, Any] = {"image_grid_thw": [[1, image.size[0] // side, image.size[1] // side]]}
    if merges:
        facts["image_merge_sizes"] = [int(p.merge_size)]
    return Drawing(pixels={"pixel_values": Output([part], item)}, facts=facts)


def _in_whole_tokens(p: Settings, image: DrawnImage) -> DrawnImage:
    """Glm5Next: scaled into the size that `smart_resize` gives, on black."""
    target, (height, width), times = smart(p, image).size, image.size, int(p.temporal_patch_size)
    scale = min(target[0] / height, target[1] / width)
    if times * height * width >= times * (p.patch_size * p.merge_size) ** 2 * p.min_image_tokens:
        scale = min(1.0, scale)
    rows, columns = (max(1, min(most, math.floor(side * scale))) for most, side in zip(target, image.size, strict=True))
    return image.scaled((rows, columns)).on_canvas(target)


def _navit(p: Settings, image: DrawnImage) -> DrawnImage:
    limits = (p.patch_size, p.merge_size, p.max_patches, p.side("max_height")[0])
    inner, outer = own(p, "navit_resize")(*image.size, *limits)
    return image.scaled(inner).on_canvas(outer)


def _by_tokens(p: Settings, image: DrawnImage) -> DrawnImage:
    return image.scaled(own(p, "smart_resize")(*image.size, p.patch_size * p.merge_size, p.max_image_tokens))


def _first(count: int, room: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return 1 for the first of a room, (1, room)."""
    return (torch.arange(room) < count).to(dtype)[None]


def siglip2(p: Settings, image: DrawnImage) -> Drawing:
    side, room = int(p.patch_size), int(p.max_num_patches)
    if p.do_resize:
        image = image.scaled(own(p, "get_image_size_for_max_num_patches")(*image.size, side, room))
    rows, columns = image.size[0] // side, image.size[1] // side
    facts = {"pixel_attention_mask": partial(_first, rows * columns, room), "spatial_shapes": [[rows, columns]]}
    return Drawing(pixels={"pixel_values": Output([pixelwise(image, side)], (3 * side**2,), (1,), room)}, facts=facts)


def lfm2(p: Settings, image: DrawnImage) -> Drawing:
    """Tiles and an overview, each as patches, padded to one number of them."""
    if not p.do_pad:
        raise UndrawnError("it does not pad")
    side, tile, splits = int(p.encoder_patch_size), int(p.tile_size), p.do_image_splitting
    names = ("downsample_factor", "min_image_tokens", "max_image_tokens", "encoder_patch_size", "max_pixels_tolerance")
    given = {name: getattr(p, name) for name in (*names, "min_tiles", "max_tiles", "tile_size")}
    given |= {"height": image.size[0], "width": image.size[1]}
    width, height = asked(p, "smart_resize", **given)
    rows = columns = 1
    pictures = [image.scaled((height, width))]
    if splits and not p.min_tiles == p.max_tiles == 1 and asked(p, "_is_image_too_large", **given):
        columns, rows = asked(p, "_get_grid_layout", **given)[:2]
        tiles = on_grid(image, (tile, tile), (rows, columns)).tiles((tile, tile))
        pictures = tiles + (pictures if p.use_thumbnail and len(tiles) > 1 else [])
    room = max(p.max_image_tokens * p.downsample_factor**2, (tile // side) ** 2 if splits else 0)
    grids = [[one.size[0] // side, one.size[1] // side] for one in pictures]
    mask = torch.cat([_first(high * wide, room) for high, wide in grids])
    facts: dict[str, Any] = {"pixel_attention_mask": mask.clone, "spatial_shapes": grids}
    if p.return_row_col_info:
        facts |= {"image_rows": [rows], "image_cols": [columns], "image_sizes": [[height, width]]}
    parts = [pixelwise(one, side) for one in pictures]
    return Drawing(pixels={"pixel_values": Output(parts, (3 * side**2,), each=room)}, facts=facts)


def gemma3(p: Settings, image: DrawnImage) -> Drawing:
    crops: list[DrawnImage] = []
    if p.do_pan_and_scan:
        height, width = image.size
        names = ("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")
        limits = {name: getattr(p, name) for name in names}
        blank = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1, 3, height, width)  # of no memory: shapes count
        if p.pan_and_scan_batched is not None:
            made = p.pan_and_scan_batched(blank, **limits)
        else:
            made = p.pan_and_scan(blank[0].numpy(), **limits)
        crops = image.tiles(tuple(made[0].shape[-2:])) if made else []
    pictures = [_usual(p, one) for one in (image, *crops)]
    return Drawing(pixels={"pixel_values": whole(*pictures)}, facts={"num_crops": [len(crops)]})


def gemma4(p: Settings, image: DrawnImage, *, merged: bool = False) -> Drawing:
    """Patches with pixels side by side, as many as there is room for; `merged`: a patch is all of a token."""
    side, kernel = int(p.patch_size), int(p.pooling_kernel_size)
    room = int(p.max_soft_tokens) * kernel**2
    if p.do_resize:
        image = image.scaled(own(p, "get_aspect_ratio_preserving_size")(*image.size, side, room, kernel))
    tokens = image.size[0] // side * (image.size[1] // side) // kernel**2
    if merged:
        side *= kernel
        room //= kernel**2
    facts = {
        "image_position_ids": partial(_places, image.size[0] // side, image.size[1] // side, room),
        "num_soft_tokens_per_image": [tokens],
    }
    return Drawing(pixels={"pixel_values": Output([pixelwise(image, side)], (3 * side**2,), (1,), room)}, facts=facts)


def _places(rows: int, columns: int, room: int) -> torch.Tensor:
    """Return column and row of each patch, (1, room, 2); -1 where there is none."""
    places = torch.full((1, room, 2), -1)
    places[0, : rows * columns, 0] = torch.arange(columns).repeat(rows)
    places[0, : rows * columns, 1] = torch.arange(rows).repeat_interleave(columns)
    return places


def _canvas(p: Settings, image: DrawnImage, tile: PixelSize, least: int, most: int) -> PixelSize:
    """Return rows and columns of the tiles of an image, by `get_optimal_tiled_canvas`."""
    columns, rows = own(p, "get_optimal_tiled_canvas")(image.size, tile, least, most)
    return rows, columns


def tiled(p: Settings, image: DrawnImage) -> Drawing:
    """InternVL, Cohere 2 Vision: tiles of a grid of the image's shape, and the whole image behind several."""
    if not p.crop_to_patches or p.max_patches < 2:
        return Drawing(pixels={"pixel_values": whole(_usual(p, image))}, facts={"num_patches": [1]})
    tile = p.box()
    sheet = on_grid(image, tile, _canvas(p, image, tile, p.min_patches, p.max_patches))
    output = on_tiles(sheet, tile, image.scaled(tile))
    return Drawing(pixels={"pixel_values": output}, facts={"num_patches": [output.shape[0]]})


def ovis2(p: Settings, image: DrawnImage) -> Drawing:
    if p.do_center_crop:
        raise UndrawnError("it crops")
    tile, grid, output = p.box(), (1, 1), whole(_usual(p, image))
    if p.crop_to_patches and p.max_patches > 1:
        grid = _canvas(p, image, tile, p.min_patches, p.max_patches)
        if p.use_covering_area_grid:
            grid = own(p, "get_min_tile_covering_grid")(image.size, tile[0], p.max_patches)[::-1]
        output = on_tiles(on_grid(image, tile, grid), tile, image.scaled(tile), first=True)
    return Drawing(pixels={"pixel_values": output}, facts={"grids": [list(grid)]})


def deepseek_ocr2(p: Settings, image: DrawnImage) -> Drawing:
    """The whole image on a square, and the tiles of one that is large enough."""
    tile = int(p.tile_size)
    side = p.box()[0] if p.crop_to_patches else tile
    scale = side / max(image.size)
    view = image.scaled((round(image.size[0] * scale), round(image.size[1] * scale)))
    pixels = {"pixel_values": whole(view.squared(tuple(p.background_color)))}
    count = 0
    if p.crop_to_patches and max(image.size) > tile:
        sheet = on_grid(image, (tile, tile), _canvas(p, image, (tile, tile), p.min_patches, p.max_patches))
        pixels["pixel_values_local"] = on_tiles(sheet, (tile, tile))
        count = pixels["pixel_values_local"].shape[0]
    return Drawing(pixels=pixels, facts={"num_local_patches": [count]})


def granite_docling(p: Settings, image: DrawnImage) -> Drawing:
    names = ("dense_max_patches", "dense_max_scale", "dense_min_aspect", "dense_max_aspect")
    given = {name: getattr(p, name) for name in ("size", "crop_to_patches", "min_patches", "max_patches", *names)}
    if p.fine_route:
        raise UndrawnError("it marks fine tiles")
    tile = p.box()
    rows, columns = own(p, "get_page_tile_grid")(*image.size, **given)
    most = own(p, "get_page_max_patches")(*image.size, **given)
    sheet = on_grid(image, tile, _canvas(p, image, tile, min(p.min_patches, most), most))
    output = on_tiles(sheet, tile, image.scaled(tile), lead=(1,))
    mask = partial(torch.ones, (1, output.shape[1]), dtype=torch.bool)
    facts = {"pixel_attention_mask": mask, "rows": ([rows],), "cols": ([columns],)}
    return Drawing(pixels={"pixel_values": output}, facts=facts, axis=1)


def idefics3(p: Settings, image: DrawnImage) -> Drawing:
    """Scaled to the longest side, then to whole tiles; the tiles, and the image scaled to one behind several."""
    side = p.side("longest_edge", of="max_image_size")[0]
    if p.do_resize:
        longest, height, width = p.side("longest_edge", "height", "width")
        size = (height, width)
        if longest:
            if p.max_image_tiles:
                longest = own(p, "get_capped_longest_edge")(*image.size, longest, side, p.max_image_tiles)
            size = own(p, "_resize_output_size_rescale_to_max_len")(*image.size, max_len=longest)
            most = own(p, "MAX_IMAGE_SIZE")
            size = own(p, "_resize_output_size_scale_below_upper_bound")(*size, max_len=most)
        image = image.scaled(size)
    sheet, rows, columns = image.scaled((side, side)), 0, 0
    if p.do_image_splitting:
        (height, width), ratio = image.size, image.size[1] / image.size[0]
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / ratio) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * ratio) / side) * side
        sheet = image.scaled((height, width))
        rows, columns = (height // side, width // side) if height * width > side**2 else (0, 0)
    output = on_tiles(sheet, (side, side), sheet.scaled((side, side)), lead=(1,))
    facts: dict[str, Any] = {}
    if p.do_pad:
        facts["pixel_attention_mask"] = partial(torch.ones, (1, output.shape[1], side, side), dtype=torch.int64)
    if p.return_row_col_info:
        facts |= {"rows": ([rows],), "cols": ([columns],)}
    return Drawing(pixels={"pixel_values": output}, facts=facts, axis=1)


def mllama(p: Settings, image: DrawnImage) -> Drawing:
    tile, most = p.box(), int(p.max_image_tiles)
    canvas = [int(one) for one in own(p, "get_optimal_tiled_canvas")(*image.size, most, tile[0])]
    size = own(p, "get_image_size_fit_to_canvas")(*image.size, *canvas, tile[0])
    rows, columns = canvas[0] // tile[0], canvas[1] // tile[1]
    sheet = image.scaled(size).on_canvas((rows * tile[0], columns * tile[1]))
    known = own(p, "get_all_supported_aspect_ratios")(most)
    facts = {
        "aspect_ratio_ids": [[known.index((rows, columns)) + 1]],
        "aspect_ratio_mask": _first(rows * columns, most, torch.int64)[None].clone,
        "num_tiles": ([rows * columns],),
    }
    pixels = Output([PatchedImage(picture=sheet, patch=tile)], (3, *tile), (1, 1), most)
    return Drawing(pixels={"pixel_values": pixels}, facts=facts, axis=1)


def llama4(p: Settings, image: DrawnImage) -> Drawing:
    tile = p.box()
    known = torch.tensor(own(p, "find_supported_resolutions")(max_num_chunks=p.max_patches, patch_size=p.size))
    canvas = own(p, "get_best_fit")(image.size, known, resize_to_max_canvas=p.resize_to_max_canvas).tolist()
    target = canvas
    if not p.resize_to_max_canvas:
        target = [min(max(one, tile[0]), most) for one, most in zip(image.size, canvas, strict=True)]
    height, width = own(p, "get_max_res_without_distortion")(image.size, target)
    sheet = image.scaled((max(height, 1), max(width, 1))).on_canvas((canvas[0], canvas[1]))
    facts = {"aspect_ratios": [[canvas[0] // tile[0], canvas[1] // tile[1]]]}
    return Drawing(pixels={"pixel_values": on_tiles(sheet, tile, image.scaled(tile))}, facts=facts)


def perception_lm(p: Settings, image: DrawnImage) -> Drawing:
    side = int(p.tile_size)
    parts = [PatchedImage(picture=image.scaled((side, side)))]
    if not p.do_resize:
        raise UndrawnError("it does not scale")
    if p.vision_input_type == "thumb+tile":
        columns, rows = 1, 1
        if p.max_num_tiles > 1:
            given = {"img_width": image.size[1], "img_height": image.size[0], "tile_size": side}
            grid = asked(p, "_fit_image_to_canvas", **given) or asked(p, "_find_closest_aspect_ratio", **given)
            columns, rows = grid
        parts.append(PatchedImage(picture=on_grid(image, (side, side), (rows, columns)), patch=(side, side)))
    return Drawing(pixels={"pixel_values": Output(parts, (3, side, side), (1,))})


def phi4(p: Settings, image: DrawnImage) -> Drawing:
    """Tiles on white, behind the whole, whose values are scaled as such; the mask of patches is the processor's."""
    tile, cells = p.box(), p.box()[0] // p.patch_size
    height, width = image.size
    columns, rows = (math.ceil(side / tile[0]) for side in (width, height))
    if columns * rows > p.dynamic_hd:
        numbers = range(1, p.dynamic_hd + 1)
        ratios = {(i, j) for n in numbers for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= p.dynamic_hd}
        ordered = sorted(ratios, key=lambda one: one[0] * one[1])  # of a set that is filled in its order
        columns, rows = p.find_closest_aspect_ratio(width / height, ordered, width, height, tile[0])
    target = (tile[0] * rows, tile[0] * columns)
    across, down = target[1] / width, target[0] / height
    inner = (int(height * across), target[1]) if across < down else (target[0], int(width * down))
    if min(inner) < 10:
        raise ValueError(f"it would be scaled to {inner} (height and width)")
    sheet = image.scaled(inner, "bilinear").on_canvas(target, colour=(255, 255, 255))
    mask = torch.ones(cells * rows, cells * columns)
    for axis, padding in enumerate((target[0] - inner[0], target[1] - inner[1])):
        if padding >= p.patch_size:
            mask.transpose(0, axis)[-(padding // p.patch_size) :] = 0
    tiles = mask.reshape(rows, cells, columns, cells).transpose(1, 2)
    seen = tiles.reshape(-1, cells, cells)[:, ::2, ::2].reshape(rows, columns, -(-cells // 2), -(-cells // 2))
    flat = seen.transpose(1, 2).reshape(rows * seen.shape[2], -1)
    masks = torch.cat([torch.ones(1, cells, cells), tiles.reshape(-1, cells, cells)])[None]
    facts = {
        "image_sizes": [list(target)],
        "image_attention_mask": masks.clone,
        "num_img_tokens": [256 + 1 + int(flat.sum()) + int(flat[:, 0].sum()) + 16],
    }
    parts = [PatchedImage(picture=sheet, floats_to=tile), PatchedImage(picture=sheet, patch=tile)]
    return Drawing(pixels={"image_pixel_values": Output(parts, (3, *tile), (1,))}, facts=facts)


def pixtral(p: Settings, image: DrawnImage) -> Drawing:
    """An image in whole patches, no longer than the processor says; images of a call are padded with zeros."""
    if p.do_resize:
        longest = p.side("longest_edge")[0]
        patch = p.patch_size if isinstance(p.patch_size, int) else p.box("patch_size")
        size = {"size": (longest, longest) if longest else p.box(), "patch_size": patch}
        image = image.scaled(asked(p, "get_resize_output_image_size", **_blank(image), **size))
    if p.do_center_crop:
        image = image.cropped(p.box("crop_size"), floor=p.floor)
    return _own_size(p, image)


def _blank(image: DrawnImage) -> dict[str, Any]:
    """Return the arguments of functions that ask an array for its size."""
    blank = np.broadcast_to(np.uint8(0), (3, *image.size))
    return {"input_image": blank, "image": blank, "input_data_format": "channels_first"}


def _own_size(p: Settings, image: DrawnImage) -> Drawing:
    return Drawing(
        pixels={"pixel_values": whole(image)}, facts={"image_sizes": [list(image.size)]}, padded=bool(p.do_pad)
    )


def between(p: Settings, image: DrawnImage) -> Drawing:
    """Emu 3 and Apertus: an image at its own resolution, between two areas."""
    least, most = p.side("min_pixels", "max_pixels")
    if p.backend is None and min(image.size) <= 4:
        raise UndrawnError("it guesses where the channels of so narrow an image are")
    if p.do_resize:
        image = image.scaled(own(p, "smart_resize")(*image.size, p.spatial_factor, least, most))
    return _own_size(p, image)


def aria(p: Settings, image: DrawnImage) -> Drawing:
    most, least = int(p.max_image_size), int(p.min_image_size)
    pictures = [image]
    if p.split_image:
        room = best_resolution(image.size, [(int(rows), int(columns)) for rows, columns in p.split_resolutions])
        pictures = image.scaled(fitted(image.size, room)).centred(room).tiles((most, most))
    made = []
    for one in pictures:
        (height, width), scale = one.size, most / max(one.size)
        wide = width >= height
        made.append(
            one.scaled((max(int(height * scale), least), most) if wide else (most, max(int(width * scale), least)))
        )
    facts = {"pixel_mask": partial(_corners, [one.size for one in made], most), "num_crops": len(made)}
    return Drawing(pixels={"pixel_values": whole(*(one.on_canvas((most, most)) for one in made))}, facts=facts)


def _corners(sizes: Sequence[PixelSize], side: int) -> torch.Tensor:
    mask = torch.zeros(len(sizes), side, side, dtype=torch.bool)
    for one, (height, width) in zip(mask, sizes, strict=True):
        one[:height, :width] = True
    return mask


def _fit_square(p: Settings, image: DrawnImage, size: str, mean: str, by: Any = None) -> DrawnImage:
    """Return an image scaled into a square, on the mean colour."""
    if p.do_resize:
        delta = p.box(size)[0] / max(image.size)
        height, width = (max(round(side * delta), p.min_size) for side in image.size)
        image = image.scaled((height, width), by)
    return image.squared(_colour(p, mean)) if p.do_pad else image


def janus(p: Settings, image: DrawnImage) -> Drawing:
    return Drawing(pixels={"pixel_values": whole(_fit_square(p, image, "size", "image_mean"))})


def deepseek_hybrid(p: Settings, image: DrawnImage) -> Drawing:
    if not p.do_resize or any(
        getattr(p, f"high_res_{name}") != getattr(p, name) for name in ("resample", "image_mean", "image_std")
    ):
        raise UndrawnError("its two resolutions have different settings")
    large = _fit_square(p, image, "high_res_size", "high_res_image_mean")
    small = _fit_square(p, large, "size", "image_mean")
    return Drawing(pixels={"pixel_values": whole(small), "high_res_pixel_values": whole(large)})


def step3p7(p: Settings, image: DrawnImage) -> Drawing:
    side, patch = p.box()[0], int(p.patch_size)
    given = {"width": image.size[1], "height": image.size[0], "image_size": side, "patch_size": patch}
    (width, height), (wide, high), window, columns, rows, square = asked(p, "_plan_patches", **given)
    if square:
        image = image.on_canvas((max(image.size),) * 2)
    pixels = {"pixel_values": whole(image.scaled((height, width)).scaled((side, side)))}
    facts: dict[str, Any] = {"num_local_patches": [0]}
    if window:
        tiles = image.scaled((high, wide)).tiles((window, window))
        pixels["pixel_values_local"] = whole(*(one.scaled((patch, patch)) for one in tiles))
        newline = [column == columns - 1 and row < rows - 1 for row in range(rows) for column in range(columns)]
        facts = {"num_local_patches": [len(tiles)], "patch_newline_masks": (newline,)}
    return Drawing(pixels=pixels, facts=facts, single=True)


def molmo2(p: Settings, image: DrawnImage) -> Drawing:
    """Crops of a canvas that overlap, behind the whole image, as patches; and which patches are pooled for a token."""
    side, patch = p.box()[0], int(p.patch_size)
    cells = side // patch
    margins = [int(one) for one in p.overlap_margins]
    step = (cells - sum(margins)) * patch
    rows, columns, height, width = own(p, "compute_crop_geometry")(*image.size, p.max_crops, margins, side, patch)
    canvas = image.scaled((height, width), smooth=False)
    crops = [canvas.cut((y * step, x * step), (side, side)) for y in range(rows) for x in range(columns)]
    small = image.scaled((side, side), smooth=False)
    parts = [pixelwise(one, patch) for one in (small, *crops)]
    grid = torch.arange(rows * columns * cells**2, dtype=torch.int32).reshape(rows, columns, cells, cells)
    left, right = margins
    if left:
        grid[1:, :, :left, :] = -1
        grid[:, 1:, :, :left] = -1
    if right:
        grid[:-1, :, -right:, :] = -1
        grid[:, :-1, :, -right:] = -1
    grid = grid.permute(0, 2, 1, 3).reshape(-1)
    grid = grid[grid >= 0].reshape(height // patch, width // patch)
    pooled, high, wide = own(p, "arange_for_pooling")(grid, *p.pooling_size)
    first = torch.arange(cells**2, dtype=torch.int32).reshape(cells, cells)
    whole_pooled, whole_high, whole_wide = own(p, "arange_for_pooling")(first, *p.pooling_size)
    places = torch.cat([whole_pooled, torch.where(pooled >= 0, pooled + cells**2, -1)])
    facts = {
        "image_token_pooling": places.clone,
        "image_grids": [[whole_high, whole_wide, high, wide]],
        "image_num_crops": [len(parts)],
    }
    pixels = {"pixel_values": Output(parts, (3 * patch**2,), each=cells**2)}
    return Drawing(pixels=pixels, facts=facts, single=True)


PROGRAMS: Mapping[str, Draw] = MappingProxyType(
    {
        **dict.fromkeys(("PilBackend", "TorchvisionBackend"), plain),
        "VideoLlava": video_llava,
        "Llava": llava,
        **dict.fromkeys(("LlavaNext", "LlavaOnevision"), llava_next),
        **dict.fromkeys(("Qwen2VL", "CohereCompass", "Ernie4_5_VLMoe", "Glm4v", "Glm46V", "Glmga"), patched),
        "MiniMaxM3VL": patched,
        "Cosmos3Edge": partial(patched, order="pixels"),
        "VideoLlama3": partial(patched, merges=True),
        **dict.fromkeys(("HunYuanVL", "HYV4VL"), partial(patched, grouped=False)),
        "PaddleOCRVL": partial(patched, grouped=False, flat=False),
        "Glm5Next": partial(patched, sized=_in_whole_tokens),
        "Kimi_K25": partial(patched, sized=_navit, grouped=False, flat=False),
        "MuseGlimmer": partial(patched, sized=_by_tokens, grouped=False, order="frames"),
        "Siglip2": siglip2,
        "Lfm2Vl": lfm2,
        "Gemma3": gemma3,
        "Gemma4": gemma4,
        "Gemma4Unified": partial(gemma4, merged=True),
        **dict.fromkeys(("GotOcr2", "Cohere2Vision"), tiled),
        "Ovis2": ovis2,
        "DeepseekOcr2": deepseek_ocr2,
        "GraniteDocling": granite_docling,
        **dict.fromkeys(("Idefics3", "SmolVLM", "UltraVBert"), idefics3),
        "Mllama": mllama,
        "Llama4": llama4,
        "PerceptionLM": perception_lm,
        "Phi4Multimodal": phi4,
        "Pixtral": pixtral,
        **dict.fromkeys(("Emu3", "Apertus1p5"), between),
        "Aria": aria,
        **dict.fromkeys(("Janus", "DeepseekVL"), janus),
        "DeepseekVLHybrid": deepseek_hybrid,
        "Step3p7": step3p7,
        "Molmo2": molmo2,
    }
)
"""What a class of processors draws, by its name without `ImageProcessor` and `ImageProcessorPil`."""


def _short(kind: type) -> str:
    return kind.__name__.removesuffix("Pil").removesuffix("ImageProcessor")


def draw_of(processor: Any) -> Draw | None:
    """Return what the nearest known class of a processor draws; None if there is none."""
    names = map(_short, type(processor).__mro__)
    return next((PROGRAMS[name] for name in names if name in PROGRAMS), None)
