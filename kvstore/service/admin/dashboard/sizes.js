// Sizes as people write them, read as the command line and the settings read them (parse_bytes in kvstore/runtime/sizes.py).

const FORM = /^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$/;
const UNITS = new Map([["", 1], ["b", 1], ...["k", "m", "g", "t", "p"].flatMap((letter, power) => [[`${letter}ib`, 1024 ** (power + 1)], [`${letter}b`, 1000 ** (power + 1)]])]);

// Bytes; null: not a size.
export function parseBytes(text) {
  const [, number, unit] = FORM.exec(text) ?? [];
  const size = UNITS.get(unit?.toLowerCase());
  return size === undefined ? null : Math.trunc(Number(number) * size);
}

// As it would be typed: exactly, in the largest unit that fits.
export function typedBytes(value) {
  const fits = ["PiB", "TiB", "GiB", "MiB", "KiB"].find((unit) => value && value % UNITS.get(unit.toLowerCase()) === 0);
  return fits ? `${value / UNITS.get(fits.toLowerCase())}${fits}` : String(value);
}
