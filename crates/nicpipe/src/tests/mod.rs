mod cases;
mod hostile;
mod order;
mod shared;
mod world;
