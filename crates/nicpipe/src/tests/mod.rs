mod cases;
mod hostile;
mod order;
mod world;
