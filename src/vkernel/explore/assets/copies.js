// Which places copy a training point: the nearest point is less than a third as far as the second nearest. It is the
// library's metrics.memorised_fraction, here for colours alone; the numbers on the page come from the server.
export function distinct(points) {
  return [...new Map(points.map((point) => [point.join(), point])).values()]
}

export function isCopy(points, x, y = 0) {
  let first = Infinity, second = Infinity
  for (const point of points) {
    const distance = Math.hypot(point[0] - x, (point[1] ?? 0) - y)
    if (distance < first) { second = first; first = distance } else if (distance < second) second = distance
  }
  return points.length < 2 || first < second / 3
}
